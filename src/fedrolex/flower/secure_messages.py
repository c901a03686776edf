"""What secure sums send from step to step, as Flower's records, and a device's secrets between steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedrolex.core import FedrolexError
from fedrolex.flower.transport import RAW
from fedrolex.privacy.masks import SECRET, SHARE, Keys
from fedrolex.privacy.quantised import Words
from fedrolex.privacy.recovery import AccusedError
from fedrolex.privacy.secure_sum import Party, Shares, SumPlan

STATE = "secure"
MOST_TEXT = 2**20  # bytes of shares from one device to another


def keys_record(keys: Mapping[int, Keys]) -> ConfigRecord:
    """Public keys by device."""
    return ConfigRecord(
        {
            "devices": list(keys),
            "seal": [each.seal for each in keys.values()],
            "mask": [each.mask for each in keys.values()],
            "signature": [each.signature for each in keys.values()],
        }
    )


def read_keys(record: RecordDict, name: str = "keys") -> dict[int, Keys]:
    """The inverse of :func:`keys_record`; raises in one line."""
    devices, seal, mask, signature = _lists(record, name, devices=int, seal=bytes, mask=bytes, signature=bytes)
    if not all(len(key) == SECRET for key in (*seal, *mask)):
        raise FedrolexError("a public key has not 32 bytes")
    return {device: Keys(*each) for device, *each in zip(devices, seal, mask, signature, strict=True)}


def texts_record(texts: Mapping[int, bytes]) -> ConfigRecord:
    """Sealed texts by device."""
    return ConfigRecord({"devices": list(texts), "texts": list(texts.values())})


def read_texts(record: RecordDict, name: str = "shares") -> dict[int, bytes]:
    """The inverse of :func:`texts_record`; raises in one line."""
    devices, texts = _lists(record, name, devices=int, texts=bytes)
    if any(len(text) > MOST_TEXT for text in texts):
        raise FedrolexError(f"shares have more than {MOST_TEXT:,} bytes")
    return dict(zip(devices, texts, strict=True))


def commitments_record(hashes: Mapping[int, bytes]) -> ConfigRecord:
    """Commitments by area."""
    return ConfigRecord({"areas": list(hashes), "hashes": list(hashes.values())})


def read_commitments(record: RecordDict, wanted: Sequence[int]) -> dict[int, bytes]:
    """The inverse of :func:`commitments_record`, for exactly these areas; raises in one line."""
    areas, hashes = _lists(record, "commitments", areas=int, hashes=bytes)
    if sorted(areas) != sorted(wanted):
        raise FedrolexError("commits itself to other areas than it holds")
    return dict(zip(areas, hashes, strict=True))


def accused_record(error: AccusedError) -> ConfigRecord:
    """Devices that a device cannot make a sum with."""
    return ConfigRecord({"devices": error.devices, "why": error.why})


def read_accused(record: RecordDict) -> AccusedError | None:
    """The inverse of :func:`accused_record`; None where nobody is accused."""
    if "accused" not in record.config_records:
        return None
    (devices,), why = _lists(record, "accused", devices=int), record.config_records["accused"].get("why")
    return AccusedError(devices, why if isinstance(why, str) else "")


def masked_record(masked: Mapping[int, Words]) -> ArrayRecord:
    """Masked values by area."""
    return ArrayRecord(
        {
            str(place): Array("uint32", tuple(words.shape), RAW, words.astype("<u4").tobytes())
            for place, words in masked.items()
        }
    )


def read_masked(record: RecordDict, sizes: Mapping[int, int]) -> dict[int, Words]:
    """The inverse of :func:`masked_record`, which must have these areas and sizes; raises in one line."""
    found = record.array_records.get("masked")
    if found is None or set(found) != {str(place) for place in sizes}:
        raise FedrolexError("sent other areas than it holds")
    wrong = next((p for p, n in sizes.items() if len(found[str(p)].data) != 4 * n or found[str(p)].stype != RAW), None)
    if wrong is not None:
        raise FedrolexError(f"sent {len(found[str(wrong)].data)} bytes for an area of {sizes[wrong]} values")
    return {place: np.frombuffer(found[str(place)].data, dtype="<u4").astype(np.uint32) for place in sizes}


def shares_record(shares: Shares) -> ConfigRecord:
    """Shares by device and area."""
    return ConfigRecord(
        {
            "devices": [device for device, _ in shares],
            "areas": [place for _, place in shares],
            "shares": list(shares.values()),
        }
    )


def read_shares(record: RecordDict, wanted: Sequence[tuple[int, int]]) -> Shares:
    """The inverse of :func:`shares_record`: exactly the shares that are wanted; raises in one line."""
    devices, areas, shares = _lists(record, "helped", devices=int, areas=int, shares=bytes)
    found = {(device, place): share for device, place, share in zip(devices, areas, shares, strict=True)}
    if set(found) != set(wanted) or len(shares) != len(found) or any(len(share) != SHARE for share in shares):
        raise FedrolexError("gave other shares than were wanted")
    return found


def keep(party: Party, state: RecordDict) -> None:
    """Put a device's secrets into its state, which never leaves it."""
    state[STATE] = ConfigRecord(
        {
            "me": party.me, "about": party.plan.about, "seal": party.seal, "mask": party.mask,
            "areas": list(party.seeds), "seeds": list(party.seeds.values()), "own": party.own, "sent": party.sent,
            "said": party.said,
        }
    )  # fmt: skip
    state[f"{STATE} keys"] = keys_record(party.keys)
    state[f"{STATE} shares"] = texts_record(party.sealed)


def kept(plan: SumPlan, me: int, state: RecordDict) -> Party:
    """A device's secrets from its state; raises, in one line, where they are of another round or plan."""
    found: Any = state.config_records.get(STATE)
    if found is None or found["about"] != plan.about or found["me"] != me:
        raise FedrolexError("the server goes on with a round, cohort or plan that it did not begin with")
    seeds = dict(zip(found["areas"], found["seeds"], strict=True))
    keys, texts = read_keys(state, f"{STATE} keys"), read_texts(state, f"{STATE} shares")
    done = bool(found["sent"]), bool(found["said"])
    return Party(me, plan, found["seal"], found["mask"], seeds, keys, found["own"], texts, *done)


def _lists(record: RecordDict, name: str, **kinds: type) -> list[list[Any]]:
    """Lists of one length in a record's part; raises in one line."""
    found = record.config_records.get(name)
    lists: list[Any] = [None if found is None else found.get(key) for key in kinds]
    for each, kind in zip(lists, kinds.values(), strict=True):
        if not isinstance(each, list) or len(each) != len(lists[0]) or not all(type(x) is kind for x in each):
            raise FedrolexError(f"the message says {name} in a wrong way")
    if len(set(lists[0])) != len(lists[0]) and "areas" not in kinds:
        raise FedrolexError(f"the message names a device twice in {name}")
    return lists
