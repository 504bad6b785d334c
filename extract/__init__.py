"""Stage one: conversations in, a store of hidden states out."""
