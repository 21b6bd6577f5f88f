"""The exceptions that a user can meet.

Each message is one sentence with the offending value, what is allowed, and the config key or
command that mends it. The command line prints it without a traceback and exits with code 1.
"""


class KvcalibError(Exception):
    """Base of every error that the user, not the programmer, can mend."""


class ConfigError(KvcalibError):
    """A setting, or a combination of settings, that cannot work."""


class MissingInput(KvcalibError):
    """Weights, text or the output of an earlier stage are not there."""


class ArtifactError(KvcalibError):
    """A calibration file or saved cache that is damaged, of another version, or made for another model."""


class UnsupportedModel(KvcalibError):
    """A model whose cache cannot be quantised; names the layer or kind at fault."""
