"""Other runtimes of the same models. Each file is imported only in its contestant's process."""
