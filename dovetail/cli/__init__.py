"""The command line: one small file per command. Modules here import only typer until a command runs."""
