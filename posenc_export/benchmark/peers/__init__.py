"""Other runtimes of the same models. Each module defines `open_session(folder, manifest,
threads, batch)` and is imported only in its contestant's process.
"""
