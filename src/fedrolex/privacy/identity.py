"""Who a device is: signatures by which devices know each other, whatever a server says.

A device signs its keys of a round with its own key, the one its node is registered with; others have its public key
in a folder that somebody they trust gave them. A server can then neither invent devices nor put its own keys in the
place of theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedrolex.core import FedrolexError
from fedrolex.privacy.masks import Keys
from fedrolex.privacy.recovery import AccusedError

HOW = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True)
class Identity:
    """A device's own key, and those of the others.

    Attributes:
        own: file of its private key, as ``ssh-keygen -t ecdsa`` makes it; None signs nothing.
        known: folder with the others' public keys, ``NUMBER.pub`` each; None believes everybody.
    """

    own: Path | None = None
    known: Path | None = None

    def signed(self, about: bytes, me: int, keys: Keys) -> Keys:
        """A device's keys of a round with its signature."""
        if self.own is None:
            return keys
        try:
            private = load_ssh_private_key(self.own.read_bytes(), password=None)
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise FedrolexError(f"identity {self.own} cannot be read: {error}") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise FedrolexError(f"identity {self.own} is no ECDSA key: make one with ssh-keygen -t ecdsa -b 384")
        return Keys(keys.seal, keys.mask, private.sign(_text(about, me, keys), HOW))

    def check(self, about: bytes, keys: Mapping[int, Keys]) -> None:
        """Raise AccusedError unless every device is a known one, and signed its keys for this round and plan."""
        if self.known is None:
            return
        strange = [device for device, given in keys.items() if not _signed(self.known, about, device, given)]
        if strange:
            raise AccusedError(strange, "is not known, or did not sign its keys")


def _signed(known: Path, about: bytes, device: int, keys: Keys) -> bool:
    try:
        public = load_ssh_public_key((known / f"{device}.pub").read_bytes())
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(keys.signature, _text(about, device, keys), HOW)
    except (OSError, ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def _text(about: bytes, device: int, keys: Keys) -> bytes:
    return b"fedrolex keys " + about + f" {device} ".encode() + keys.seal + keys.mask
