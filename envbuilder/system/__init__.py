"""Debian packages and interpreters made into layers: no daemon, no chroot, no root."""
