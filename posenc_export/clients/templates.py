"""Read templates of programs: files of templates/ whose sections are filled with the values of an
artefact.

A section begins with a line `=== NAME ===` or `=== NAME CONDITION ===`; short ones are lines `NAME:
TEXT` or `NAME CONDITION: TEXT` of the section `values`. Of several sections of one name, the first
whose condition holds is taken. `@NAME` stands for a value or, if there is none, for a section. A
line that holds nothing else becomes the lines of the value; if the value is empty, it is left out
with the blank line after it.
"""

import re
from importlib import resources
from typing import Any, Collection, Dict, Match

HEAD = re.compile(r"^=== (\w+) ?(\w*) ===\n", re.MULTILINE)
SHORT = re.compile(r"^(\w+) ?(\w*): ?(.*)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"^@(?P<line>\w+)\n(?P<blank>\n?)|@(?P<word>\w+)", re.MULTILINE)


class Template:
    """The sections of templates/NAME.txt.

    Args:
        name: name of the file.
        conditions: conditions that hold for the artefact.
        values: values by name.
    """

    def __init__(self, name: str, conditions: Collection[str], values: Dict[str, Any]) -> None:
        text = (
            resources.files("posenc_export.clients")
            .joinpath("templates", f"{name}.txt")
            .read_text(encoding="utf-8")
        )
        parts = HEAD.split(text)
        self.sections = list(
            zip(parts[1::3], parts[2::3], (part.strip("\n") for part in parts[3::3]), strict=True)
        )
        self.conditions, self.values = conditions, values
        self.sections += SHORT.findall(
            next(text for name, _, text in self.sections if name == "values")
        )

    def fill(self, section: str, condition: str = "", **values: Any) -> str:
        """Return a section filled with the values of the template and with `values`. condition:
        holds in addition to those of the template.
        """
        holding = ("", condition, *self.conditions)
        text = next(
            text for name, needed, text in self.sections if name == section and needed in holding
        )

        def value(found: Match[str]) -> str:
            name = found["line"] or found["word"]
            known = {**self.values, **values}
            text = str(known[name]) if name in known else self.fill(name, condition, **values)
            return text if found["word"] else f"{text}\n{found['blank']}" if text else ""

        return PLACEHOLDER.sub(value, f"{text}\n")[:-1]

    def table(self, section: str) -> Dict[str, str]:
        """Return the lines `KEY: VALUE` of a section."""
        return dict(line.split(": ", 1) for line in self.fill(section).splitlines())
