"""The commands: a module here that defines `COMMAND` is a command, named by its file."""
