"""Add the bill of materials to an unpacked wheel, in CycloneDX: ``python ci/sbom.py SDIST FOLDER``.

A wheel needs no other package. Its modules contain code that Cython generated from the sdist; each names its version.
Equal wheels get equal bytes; the date is that of ``SOURCE_DATE_EPOCH``.
"""

import hashlib
import os
import re
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL


def library(name: str, version: str, license_id: str, sha256: str | None = None) -> Component:
    purl = PackageURL("pypi", None, name, version)
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=str(purl),
        purl=purl,
        licenses=[DisjunctiveLicense(id=license_id)],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [],
    )


sdist, wheel = Path(sys.argv[1]), Path(sys.argv[2])
versions = {
    match
    for module in wheel.rglob("*.so")
    for match in re.findall(rb"\x00_cython_([0-9]+)_([0-9]+)_([0-9]+)\x00", module.read_bytes())
}
if len(versions) != 1:
    sys.exit(f"the modules of {wheel} name the versions {versions} of Cython, not one")
cython_version = b".".join(versions.pop()).decode()
sha256 = hashlib.sha256(sdist.read_bytes()).hexdigest()
version = sdist.name.removeprefix("forebay-").removesuffix(".tar.gz")
forebay = library("forebay", version, "MIT", sha256)
cython = library("cython", cython_version, "Apache-2.0")
bom = Bom(components=[cython], serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{forebay.bom_ref}#{sha256}"))
bom.metadata.component = forebay
bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
bom.register_dependency(forebay, [cython])
text = JsonV1Dot6(bom).output_as_string(indent=1)
if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
    sys.exit(f"the bill of materials is not valid: {error}")
[information] = wheel.glob("*.dist-info")
folder = information / "sboms"
folder.mkdir(exist_ok=True)
(folder / "forebay.cdx.json").write_text(text + "\n")
