"""What is on disk: manifest, files, tokenizer, and the publishing of folders."""
