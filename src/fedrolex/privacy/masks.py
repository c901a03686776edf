"""What secure sums are made of: keys that two devices agree on, sealed messages, shares, streams of random words.

Keys are X25519, sealed with ChaCha20-Poly1305, streams are AES-256 in counter mode, all of ``cryptography``; shares are
Shamir's, Flower's own helper. (Flower's pseudo-random helper folds its seed to 32 bits, which can be tried out; it is
not used.)
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares

from fedrolex.core import FedrolexError
from fedrolex.privacy.quantised import Words

SECRET = 32  # bytes
SHARE = SECRET + 20  # bytes of a share of one, as Flower's helper makes it
NONCE = 12


@dataclass(frozen=True)
class Keys:
    """A device's public keys of one round: one to seal messages to it, one that its masks are made from.

    With a signature, where devices know each other: see :mod:`fedrolex.privacy.identity`.
    """

    seal: bytes
    mask: bytes
    signature: bytes = field(default=b"", compare=False)


def secret() -> bytes:
    """32 bytes that nobody can guess; a private key of X25519, too."""
    return os.urandom(SECRET)


def public(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, other: bytes, about: bytes) -> bytes:
    """A key that two devices have in common, for one purpose."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise FedrolexError(f"a device's public key is none: {error}") from error
    return derived(shared, about)


def derived(key: bytes, about: bytes) -> bytes:
    """A key from another one, for one purpose."""
    return HKDF(hashes.SHA256(), length=SECRET, salt=None, info=b"fedrolex secure sum " + about).derive(key)


def sealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """A text that only who has the key can read, bound to what it is about."""
    nonce = os.urandom(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about)


def opened(key: bytes, text: bytes, about: bytes) -> bytes:
    """A sealed text; one that was made for something else raises in one line."""
    try:
        return ChaCha20Poly1305(key).decrypt(text[:NONCE], text[NONCE:], about)
    except (InvalidTag, ValueError) as error:
        raise FedrolexError("another device was told of another round, cohort or plan: nothing is unmasked") from error


def stream(key: bytes, about: bytes, count: int) -> Words:
    """``count`` random words of 32 bits, the same for everyone who has the key."""
    encryptor = Cipher(algorithms.AES256(derived(key, about)), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * count)), dtype="<u4").astype(np.uint32)


def usable(key: bytes) -> bool:
    """Whether others can agree on something with who has this public key; of a few points nobody can."""
    try:
        agreed(secret(), key, b"")
    except FedrolexError:
        return False
    return True


def committed(text: bytes, about: bytes) -> bytes:
    """What tells a secret from others later, and nothing of it now."""
    return hashlib.sha256(b"fedrolex commitment " + about + text).digest()


def shares(text: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret, ``threshold`` of which give it back, and fewer nothing."""
    return [bytes(share) for share in create_shares(text, threshold, count)]


def joined(found: Sequence[bytes], threshold: int) -> bytes:
    """A secret from its shares."""
    return bytes(combine_shares(list(found)[:threshold]))
