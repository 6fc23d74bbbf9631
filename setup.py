"""The description that a package index shows: README.md, whose links become absolute if URL is the
address of the repository (make wheels URL=...).
"""

import os
import re
from pathlib import Path

from setuptools import setup

URL = os.environ.get("URL", "").rstrip("/")


def described(text: str, url: str) -> str:
    """Return the text with absolute links: to raw files for pictures, else to pages."""
    return (
        re.sub(
            r"(!?\[[^\]]*\])\((?![a-z]+:|#)",
            lambda link: f"{link[1]}({url}/{'raw' if link[1][0] == '!' else 'blob'}/HEAD/",
            text,
        )
        if url
        else text
    )


setup(
    long_description=described(
        Path(__file__).with_name("README.md").read_text(encoding="utf-8"), URL
    ),
    long_description_content_type="text/markdown",
    project_urls={
        "Repository": URL,
        "Documentation": f"{URL}/tree/HEAD/docs",
        "Changelog": f"{URL}/blob/HEAD/CHANGELOG.md",
    }
    if URL
    else {},
)
