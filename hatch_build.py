"""README.md as a package index shows it: what it links to in the repository has the repository's address."""

import pathlib
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Gives a release the README with whole addresses; an index knows no files beside it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the README into a release's metadata."""
        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata["urls"]["Source"]

        def whole(link: re.Match[str]) -> str:
            kind = "raw" if link[1] else "blob"
            return f"{link[1]}[{link[2]}]({source}/{kind}/main/{link[3]})"

        text = re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)", whole, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
