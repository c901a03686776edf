"""What keeps a client's update from others: secure sums of sub-models, differential privacy's accountant.

Needs the extra ``fedrolex[flower]``, of which nothing is imported before it is used.
"""
