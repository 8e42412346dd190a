"""Training: recipes, batches, losses, the loop, checkpoints, evaluation while it runs."""
