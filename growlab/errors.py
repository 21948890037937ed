"""The one exception that a user is meant to read."""


class UserError(Exception):
    """Input that growlab cannot use, told in one sentence: what is wrong and what to do about it.

    `python -m growlab` prints the sentence after `error:` and exits with code 2, without a traceback.
    """
