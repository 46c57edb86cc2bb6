#!/usr/bin/env python3
"""Opens the golden set of credential leases a second time.

Written from docs/credential-lease.md and RFC 9180, not from the Rust code: only X25519, Ed25519 and ChaCha20-Poly1305
come from a library. HPKE, the format and the order of the checks are here. Exits 1 when one case comes out otherwise
than the file says.
"""

import hashlib
import hmac
import json
import struct
import sys

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

FIELDS = ["principal", "route", "slot", "profile", "target", "node", "upstream", "run_id"]
MIN_BYTES, MAX_BYTES = 472, 10_440
FRAMING = {
    "connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
}
# Order of the Ed25519 group: the second half of a signature is below it.
ORDER = 2**252 + 27742317777372353535851937790883648493
# The points whose order divides 8, in their one spelling. No first half of a signature is one of them.
LOW_ORDER = {
    bytes.fromhex(point)
    for point in [
        "0100000000000000000000000000000000000000000000000000000000000000",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0000000000000000000000000000000000000000000000000000000000000080",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    ]
}


class Refused(Exception):
    pass


# HPKE, RFC 9180, base mode: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305.

KEM_SUITE = b"KEM" + struct.pack(">H", 0x0020)
HPKE_SUITE = b"HPKE" + struct.pack(">HHH", 0x0020, 0x0001, 0x0003)


def extract(salt, ikm):
    return hmac.new(salt or bytes(32), ikm, hashlib.sha256).digest()


def expand(prk, info, length):
    out, block, counter = b"", b"", 1
    while len(out) < length:
        block = hmac.new(prk, block + info + bytes([counter]), hashlib.sha256).digest()
        out += block
        counter += 1
    return out[:length]


def labeled_extract(suite, salt, label, ikm):
    return extract(salt, b"HPKE-v1" + suite + label + ikm)


def labeled_expand(suite, prk, label, info, length):
    return expand(prk, struct.pack(">H", length) + b"HPKE-v1" + suite + label + info, length)


def hpke_open(private, enc, info, aad, sealed):
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(enc))
    except ValueError:  # all zeros: a point of low order
        return None
    if shared == bytes(32):
        return None
    own = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    eae_prk = labeled_extract(KEM_SUITE, b"", b"eae_prk", shared)
    secret = labeled_expand(KEM_SUITE, eae_prk, b"shared_secret", enc + own, 32)
    context = (
        b"\x00"
        + labeled_extract(HPKE_SUITE, b"", b"psk_id_hash", b"")
        + labeled_extract(HPKE_SUITE, b"", b"info_hash", info)
    )
    prk = labeled_extract(HPKE_SUITE, secret, b"secret", b"")
    key = labeled_expand(HPKE_SUITE, prk, b"key", context, 32)
    nonce = labeled_expand(HPKE_SUITE, prk, b"base_nonce", context, 12)
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, aad)
    except InvalidTag:
        return None


def check_hpke():
    """RFC 9180, A.2.1, so that two equal mistakes in the set and here can't pass."""
    private = X25519PrivateKey.from_private_bytes(
        bytes.fromhex("8057991eef8f1f1af18f4a9491d16a1ce333f695d4db8e38da75975c4478e0fb"))
    plaintext = hpke_open(
        private,
        bytes.fromhex("1afa08d3dec047a643885163f1180476fa7ddb54c6a8029ea33f95796bf2ac4a"),
        bytes.fromhex("4f6465206f6e2061204772656369616e2055726e"),
        b"Count-0",
        bytes.fromhex(
            "1c5250d8034ec2b784ba2cfd69dbdb8af406cfe3ff938e131f0def8c8b60b4db21993c62ce81883d2dd1b51a28"))
    assert plaintext == b"Beauty is truth, truth beauty", "HPKE is not that of RFC 9180"


# The lease.


def key_id(purpose, public):
    return hashlib.sha256(b"iop/kid/v1\0" + bytes([purpose]) + public).digest()[:16]


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, length):
        if len(self.data) - self.at < length:
            raise Refused("malformed")
        self.at += length
        return self.data[self.at - length:self.at]


def signed_strictly(public, signature, text):
    if int.from_bytes(signature[32:], "little") >= ORDER or signature[:32] in LOW_ORDER:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
        return True
    except InvalidSignature:
        return False


def parse(lease):
    reader = Reader(lease)
    reader.take(4 + 2)
    out = {"issuer": reader.take(16), "recipient": reader.take(16), "id": reader.take(16)}
    out["issued"], out["expires"], out["revision"], out["generation"] = struct.unpack(">4Q", reader.take(32))
    out["names"] = {}
    for field in FIELDS:
        name = reader.take(reader.take(1)[0])
        if not name or any(byte < 0x21 or byte > 0x7E for byte in name):
            raise Refused("malformed")
        out["names"][field] = name.decode()
    out["claims"] = lease[:reader.at]
    out["enc"] = reader.take(32)
    length = struct.unpack(">H", reader.take(2))[0]
    if length < 16 or (length - 16) % 256 != 0 or not 1 <= (length - 16) // 256 <= 32:
        raise Refused("malformed")
    out["sealed"] = reader.take(length)
    if len(lease) - reader.at != 64:
        raise Refused("malformed")
    return out


def check_time(lease, node):
    if lease["expires"] <= lease["issued"]:
        raise Refused("malformed")
    if lease["expires"] - lease["issued"] > node["max_ttl_ms"]:
        raise Refused("ttl_too_long")
    if node["now_ms"] is None:
        raise Refused("clock_unavailable")
    if lease["issued"] > node["now_ms"] + node["future_skew_ms"]:
        raise Refused("not_yet_valid")
    if lease["expires"] <= node["now_ms"]:
        raise Refused("expired")


def check_slot_and_generation(lease, node):
    slot = (node["slots"] or {}).get(lease["names"]["slot"], {"status": "revoked"})
    if slot["status"] != "enabled":
        raise Refused(slot["status"])
    if lease["revision"] < int(slot["revision"]):
        raise Refused("stale_revision")
    if lease["generation"] != int(node["generation"]):
        raise Refused("stale_generation")


def verify(lease, node):
    if not MIN_BYTES <= len(lease) <= MAX_BYTES or lease[:4] != b"IOPL":
        raise Refused("malformed")
    if lease[4:6] != b"\x01\x01":
        raise Refused("unsupported_version")
    trusted = {key_id(1, public): public for public in map(bytes.fromhex, node["trusted_issuers"])}
    if lease[6:22] not in trusted:
        raise Refused("unknown_issuer")
    if not signed_strictly(trusted[lease[6:22]], lease[-64:], b"iop/credential-lease/v1/sig\0" + lease[:-64]):
        raise Refused("bad_signature")
    parsed = parse(lease)
    if parsed["recipient"] != key_id(2, bytes.fromhex(node["recipient_public"])):
        raise Refused("wrong_recipient")
    check_time(parsed, node)
    for field in FIELDS:
        if parsed["names"][field] != node["expected"][field]:
            raise Refused(f"binding_mismatch:{field}")
    check_slot_and_generation(parsed, node)
    return parsed


def header_of(plaintext):
    if len(plaintext) < 3:
        return None
    kind, length = struct.unpack(">BH", plaintext[:3])
    secret, padding = plaintext[3:3 + length], plaintext[3 + length:]
    if len(secret) != length or len(padding) >= 256 or any(padding):
        return None
    if kind == 1:
        if not secret or any(byte < 0x21 or byte > 0x7E for byte in secret):
            return None
        return "authorization", "Bearer " + secret.decode()
    if kind != 2 or not secret:
        return None
    name, value = secret[1:1 + secret[0]], secret[1 + secret[0]:]
    if len(name) != secret[0] or not 1 <= len(name) <= 64 or not value:
        return None
    if any(byte not in b"abcdefghijklmnopqrstuvwxyz0123456789-_" for byte in name) or name.decode() in FRAMING:
        return None
    if any(byte < 0x20 or byte > 0x7E for byte in value) or value[:1] == b" " or value[-1:] == b" ":
        return None
    return name.decode(), value.decode()


def use(lease, node, used):
    parsed = verify(lease, node)
    # The request has its place now. In this file no time passes; both are asked again all the same.
    check_time(parsed, node)
    check_slot_and_generation(parsed, node)
    for name in [name for name, expires in used.items() if expires <= node["now_ms"]]:
        del used[name]
    name = (parsed["issuer"], parsed["id"])
    if name in used:
        raise Refused("replayed")
    if len(used) >= node["replay_entries"]:
        raise Refused("replay_store_full")
    used[name] = parsed["expires"]
    plaintext = hpke_open(
        X25519PrivateKey.from_private_bytes(bytes.fromhex(node["recipient_private"])),
        parsed["enc"],
        b"iop/credential-lease/v1/seal\0" + b"\x01\x01" + parsed["issuer"] + parsed["recipient"],
        b"iop/credential-lease/v1/aad\0" + parsed["claims"],
        parsed["sealed"],
    )
    header = plaintext and header_of(plaintext)
    if not header:
        raise Refused("open_failed")
    return {"opened": {"header": header[0], "value": header[1]}}


def outcome(lease, node, used):
    try:
        return use(bytes.fromhex(lease), node, used)
    except Refused as refused:
        return {"refused": str(refused)}


def main(path):
    check_hpke()
    with open(path, encoding="ascii") as file:
        golden = json.load(file)
    wrong = 0
    for case in golden["cases"]:
        changes = dict(case["node"])
        expected = {**golden["node"]["expected"], **changes.pop("expected", {})}
        used_before = changes.pop("used_before", [])
        node = {**golden["node"], **changes, "expected": expected}
        used = {}
        for lease in used_before:
            outcome(lease, node, used)
        got = outcome(case["lease"], node, used)
        if got != case["outcome"]:
            wrong += 1
            # Only the kind of outcome: the habit of not printing a credential starts with example ones.
            want = case["outcome"].get("refused", "opened")
            print(f"{case['name']}: {got.get('refused', 'opened')}, not {want}", file=sys.stderr)
    print(f"credential opener: {len(golden['cases'])} cases, {wrong} wrong")
    return 1 if wrong or not golden["cases"] else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: opener.py golden.json")
    sys.exit(main(sys.argv[1]))
