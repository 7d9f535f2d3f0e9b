"""The command line. Nothing here imports torch until a command runs."""
