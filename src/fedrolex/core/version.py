"""The installed version."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("fedrolex")
except PackageNotFoundError:  # a checkout that was not installed
    VERSION = "0+unknown"
