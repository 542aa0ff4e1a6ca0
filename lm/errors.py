"""The error a user can mend."""


class ConfigError(ValueError):
    """Bad input: its message is one line that says what is wrong, where, and what to do.

    Commands print it as `error: ...` and exit with status 2; any other exception is a defect and keeps its traceback.
    """


class RunStopped(ConfigError):
    """A run that would only get worse has stopped itself; the message says why, where it stands and what to change."""
