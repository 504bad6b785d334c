"""The drafter and its loss as training runs them: everything between a batch and its gradients."""
