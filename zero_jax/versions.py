"""The versions of installed packages, by their metadata: nothing is imported."""

from importlib import metadata


def installed_version(package: str) -> str:
    """As 0.1.0; "not installed" without metadata, as of a checkout on PYTHONPATH."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
