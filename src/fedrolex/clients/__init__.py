"""A client: what it is asked, what it does with its sub-model, what it answers."""
