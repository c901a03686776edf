"""``python -m fedrolex``."""

from fedrolex.cli.app import main

main()
