"""`kpl.proto` and the messages built at import say the same."""

from importlib import resources

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.internal import api_implementation
from grpc_tools import protoc

import kclrun.codec
from kclrun.codec.kpl import ABSENT_HASH_KEY, ABSENT_KEY, aggregate_descriptor, parse_aggregate


def test_compiling_the_proto_gives_the_descriptor_built_at_import(tmp_path):
    source = resources.files(kclrun.codec) / "kpl.proto"
    (tmp_path / "kclrun/codec").mkdir(parents=True)
    (tmp_path / "kclrun/codec/kpl.proto").write_bytes(source.read_bytes())
    compiled = tmp_path / "kpl.descriptors"

    failed = protoc.main(
        ["protoc", f"-I{tmp_path}", f"--descriptor_set_out={compiled}", "kclrun/codec/kpl.proto"]
    )

    assert not failed
    (file,) = FileDescriptorSet.FromString(compiled.read_bytes()).file
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")  # protoc derives it; nothing here is ever JSON.
    built = aggregate_descriptor()
    assert file == built
    assert file.SerializeToString(deterministic=True) == built.SerializeToString(deterministic=True)


def test_the_messages_run_on_the_c_implementation():
    assert api_implementation.Type() == "upb"


def test_an_index_that_was_not_written_reads_as_absent():
    (record,) = parse_aggregate(b"\x1a\x02\x1a\x00").records

    indexes = (record.partition_key_index, record.explicit_hash_key_index)
    assert indexes == (ABSENT_KEY, ABSENT_HASH_KEY)


def test_it_shares_a_process_with_another_copy_of_the_schema():
    from aws_kinesis_agg.deaggregator import messages_pb2

    assert messages_pb2.AggregatedRecord().IsInitialized()
