"""The one error the lab raises: a line that says what is missing, why it is needed and what to do."""


class LabError(Exception):
    """The lab cannot do what was asked; the message is one line for a person."""
