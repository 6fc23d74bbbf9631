"""What is registered, as tables, pictures and pages: posenc list, posenc plot, docs/."""
