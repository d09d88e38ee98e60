"""Addresses of the project, and README.md as a package index shows it, with whole links."""

import pathlib
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AddressHook(MetadataHookInterface):
    """Adds to a release the project's addresses, and the README whose links begin with them."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write `urls` and `readme`, from `address` in pyproject.toml."""
        address = self.config["address"]
        metadata["urls"] = {
            "Homepage": address,
            "Documentation": f"{address}/docs",
            "Source": f"{address}/source",
            "Issues": f"{address}/issues",
            "Changelog": f"{address}/changelog",
        }
        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata["urls"]["Source"]

        def whole(link: re.Match[str]) -> str:
            kind = "raw" if link[1] else "blob"
            return f"{link[1]}[{link[2]}]({source}/{kind}/main/{link[3]})"

        text = re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)", whole, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
