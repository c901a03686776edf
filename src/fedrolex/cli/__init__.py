"""The command line: ``fedrolex COMMAND``. One file a command; :mod:`fedrolex.cli.app` puts them together."""
