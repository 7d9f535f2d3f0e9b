"""The command line. No module of it imports torch before a command runs."""
