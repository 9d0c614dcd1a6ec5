from __future__ import annotations

import pytest

from envbuilder.lock.coremetadata import canonical_requirement, core_metadata


def test_requirements_are_canonical_and_sorted():
    data = b"""\
Metadata-Version: 2.1
Name: My.Package
Version: 1.0
Requires-Python: <4, >=3.9
Provides-Extra: Fast_IO
Requires-Dist: Zope.Interface (>=5.0,<6)
Requires-Dist: attrs[Dev_Tools] >= 21.1 ; python_version<"3.13"
Requires-Dist: attrs[Dev_Tools]>=21.1; python_version < '3.13'
Requires-Dist: speed; extra == 'Fast_IO'

A description with
Requires-Dist: nothing
"""
    metadata = core_metadata(data)
    assert metadata.name == "my-package"
    assert metadata.version == "1.0"
    assert metadata.requires == (
        'attrs[dev-tools]>=21.1; python_version < "3.13"',
        'speed; extra == "fast-io"',
        "zope-interface<6,>=5.0",
    )
    assert metadata.requires_python == "<4,>=3.9"
    assert metadata.extras == ("fast-io",)
    assert metadata.invalid == ()


@pytest.mark.parametrize(
    ("published", "meant"),
    [
        ("torch>=1.9.*", "torch>=1.9"),
        ("h5py2>=2.9.*", "h5py2>=2.9"),
        ("numpy (>=1.9.*,<2.*)", "numpy<2,>=1.9"),
        ("six>=1.5,", "six>=1.5"),
        ("six>=1.5 <2", "six<2,>=1.5"),
        ("six>=1.5.*; python_version >= '3'", 'six>=1.5; python_version >= "3"'),
        ("six==1.*", "six==1.*"),
        ("six!=1.5.*", "six!=1.5.*"),
    ],
)
def test_old_slips_are_mended(published: str, meant: str):
    assert canonical_requirement(published) == meant


def test_what_cannot_be_mended_is_named_and_spoils_nothing_else():
    data = (
        b"Metadata-Version: 2.1\nName: x\nVersion: 1\nRequires-Dist: good>1\nRequires-Dist: bad>>1\n"
        b"Requires-Python: three\n"
    )
    metadata = core_metadata(data)
    assert metadata.requires == ("good>1",)
    assert metadata.requires_python is None
    assert metadata.invalid == ("bad>>1", "Requires-Python: three")


def test_metadata_that_is_not_utf8_or_says_things_twice():
    metadata = core_metadata(b"Metadata-Version: 1.1\nName: x\nVersion: 1\nAuthor: J\xf6rg\nSummary: a\nSummary: b\n")
    assert (metadata.name, metadata.version, metadata.requires) == ("x", "1", ())
