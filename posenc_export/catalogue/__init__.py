"""Tables and pictures of what is registered, for posenc list, posenc plot and docs/."""
