"""Dead letters for tests."""

from kclrun.model.letter import LETTER_VERSION, Letter


def letter(number: int = 11, sub: int = 0, **fields: object) -> Letter:
    values = {
        "version": LETTER_VERSION,
        "application": "shop",
        "processor": "shop:Orders",
        "stream": "orders",
        "shard_id": "shardId-000000000002",
        "sequence_number": str(number),
        "sub_sequence_number": sub,
        "partition_key": "k",
        "explicit_hash_key": None,
        "arrived_at": 5.0,
        "data": b"\x00\xff",
        "error": "ValueError: x",
        "raised_at": "shop.py:3 in process",
        "traceback": "Traceback",
        "calls": 3,
        "given_up_at": 9.0,
    }
    return Letter(**(values | fields))
