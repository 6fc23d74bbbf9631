"""What is on disk: the manifest, the files that it lists, the tokenizer, and the publishing of
folders.
"""
