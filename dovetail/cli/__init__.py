"""The command line: one small file a command. Modules here import only typer until a command runs."""
