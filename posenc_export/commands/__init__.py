"""Parts of the `posenc` command, one file each."""
