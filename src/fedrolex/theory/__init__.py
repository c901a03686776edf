"""What can be known without training: coverage, costs, the lemmas of the paper."""
