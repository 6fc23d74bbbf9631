"""The form of messages about values that do not follow a rule."""


def refusal(where: str, rule: str, got: object, remedy: str = "") -> ValueError:
    """Return the ValueError `where: expected rule, got got; remedy`."""
    return ValueError(f"{where}: expected {rule}, got {got}" + (f"; {remedy}" if remedy else ""))
