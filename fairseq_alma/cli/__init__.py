"""The commands that the package installs."""
