"""One file per measured claim in the README."""
