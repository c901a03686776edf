"""What a device runs: a sub-model chosen, calibrated, maybe taught, and written in formats that others read."""
