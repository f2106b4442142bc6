"""moto, which refuses an item whose index key has a wrong type, as DynamoDB does. By itself moto
refuses the type NULL and an empty text only."""

from moto.dynamodb import responses
from moto.dynamodb.exceptions import MockValidationException

from kclrun.local.moto_process import _moto_application
from kclrun.local.serving import serve_as_child


def refuse_wrong_types(item, table):
    types = {each["AttributeName"]: each["AttributeType"] for each in table.attr}
    for index in table.global_indexes:
        for name in (each["AttributeName"] for each in index.schema):
            found = next(iter(item[name])) if name in item else types[name]
            if found != types[name]:
                raise MockValidationException(
                    "One or more parameter values were invalid: Type mismatch for Index Key"
                    f" {name} Expected: {types[name]} Actual: {found} IndexName: {index.name}"
                )


if __name__ == "__main__":
    responses.validate_put_has_gsi_keys_set_to_none = refuse_wrong_types
    serve_as_child(_moto_application)
