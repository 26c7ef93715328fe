"""What each error code means, and what to do: the only home of both.

A test compares the codes with those of the product.

A code is listed where it can occur: in lines of error files, in the errors of a batch, in answers
of the API, in refusals of commands.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Code(NamedTuple):
    """One row. ``status`` is that of the API's answer, where there is one."""

    code: str
    meaning: str
    remedy: str
    status: str = ""


LINES: Final = (
    Code(
        "batch_expired",
        "The completion window ended before this request ran.",
        "`batchyard retry BATCH --completion-window 48h`, or create the next batch with a longer "
        "window. `batchyard estimate` says how long a file takes.",
    ),
    Code(
        "batch_cancelled",
        "The batch was cancelled before this request ran.",
        "`batchyard retry BATCH` runs what is missing.",
    ),
    Code(
        "batch_failed",
        "The batch failed before this request ran.",
        "Read the batch's own errors, correct the cause, then `batchyard retry BATCH`.",
    ),
    Code(
        "request_timeout",
        "The engine took longer for this request than `BATCHYARD_REQUEST_TIMEOUT_SECONDS`.",
        "Lower `max_tokens`, or raise the setting for the GPU workers.",
    ),
    Code(
        "engine_crash",
        "The engine crashed twice while it ran only this request.",
        "Read the engine's log (`logs/engine-NAME.log` in `BATCHYARD_HOME`) for the cause, and "
        "leave the request out or change it. Repeating it as it is crashes the engine again.",
    ),
    Code(
        "server_error",
        "No connection to the engine lasted until the answer, or Batchyard could not process "
        "this line.",
        "`batchyard retry BATCH`. If it happens again, the log of the `run-chunks` flow run has "
        "the reason.",
    ),
    Code(
        "file_url_unavailable",
        "The file that the line names as `file_url` could not be fetched or read.",
        "The message says why. Correct the URL, or put the file into the body as a `data:` URL.",
    ),
    Code(
        "invalid_output",
        "The batch has `on_invalid_output` with `then` `error_file`, and the last answer is a bad "
        "one as well.",
        "The message says which test it failed. `batchyard retry BATCH --code invalid_output` with "
        "other parameters (`--set max_tokens=8192`) runs the request again.",
    ),
    Code(
        "template_failed",
        "The template of a further stage made no request from the line: it failed, took too long, "
        "or made no JSON object.",
        "The message says why. Correct the template and submit the batch again.",
    ),
    Code(
        "endpoint_not_served",
        "A 404 in `response`: the engine does not serve the line's `url`.",
        "The message lists the endpoints that the engine serves. Use one of them, or a model that "
        "has the endpoint.",
    ),
    Code(
        "answer_too_long",
        "A 500 in `response`: a remote server's answer was longer than 256 MiB.",
        "Ask for less in one request, for example fewer embeddings.",
    ),
)

INPUT: Final = (
    Code(
        "invalid_json_line",
        "The line is not one JSON object in UTF-8.",
        "Write each request as one line, with a JSON library.",
    ),
    Code(
        "line_too_long",
        "The line has more bytes than `BATCHYARD_LIMITS__MAX_LINE_BYTES`.",
        "Make the request smaller, or ask the operator to raise the limit.",
    ),
    Code(
        "invalid_request",
        "The line or its body is not an object, or a field is missing or has the wrong type. In a "
        "deep validation: vLLM's own rules refuse the request.",
        "`param` names the field. [The endpoints](../input-format.md#endpoints) says what each "
        "body needs. With `param` `file_id`, the input file has expired or was deleted: upload "
        "it again.",
    ),
    Code(
        "missing_required_parameter",
        "The line has no `custom_id`, `method`, `url` or `body`.",
        "Add the key that `param` names.",
    ),
    Code(
        "invalid_custom_id",
        "The `custom_id` has more than 512 characters, or a NUL.",
        "Shorten it.",
    ),
    Code(
        "duplicate_custom_id",
        "An earlier line has the same `custom_id`.",
        "Give each line an id of its own.",
    ),
    Code("invalid_method", "`method` is not `POST`.", "Write `POST`."),
    Code(
        "endpoint_not_served",
        "No engine that is set up can serve the line's `url`; `line` is the first one.",
        "The message lists the endpoints that engines here may serve. Use one of them, or have a "
        "server set up that has this one.",
    ),
    Code(
        "invalid_url",
        "`url` is not the batch's endpoint, or no batch may name it.",
        "Use [an endpoint that batches may name](../input-format.md#endpoints), the same as that "
        "of the batch.",
    ),
    Code(
        "model_not_found",
        "The line names another model than the batch, or a name that no model or adapter has.",
        "Correct `body.model`, or create the batch without `model`.",
    ),
    Code(
        "mismatched_model",
        "The line names another model than the first line, or an adapter of another model.",
        "Make one file for each model and its adapters.",
    ),
    Code(
        "streaming_unsupported",
        "`stream` is set.",
        "Remove `stream`.",
    ),
    Code(
        "unsupported_parameter",
        "Clients may not set this field, because it affects the engine or other users.",
        "Remove the field, or ask the operator to allow it with "
        "`BATCHYARD_BODIES__ALLOWED_FIELDS`.",
    ),
    Code(
        "media_url_refused",
        "A URL of an image, recording or video leads to a host that the operator has not named.",
        "Put the media into the body as a `data:` URL, or ask the operator to add the host to "
        "`BATCHYARD_BODIES__MEDIA_DOMAINS`.",
    ),
    Code(
        "integer_above_max_value",
        "A number such as `n` or `logprobs` is above its limit or below 0.",
        "Lower it. [The limits](../input-format.md#what-clients-may-not-send) are settings.",
    ),
    Code(
        "array_above_max_length",
        "A list such as `stop` or `logit_bias` has too many entries.",
        "Shorten it. [The limits](../input-format.md#what-clients-may-not-send) are settings.",
    ),
    Code(
        "schema_too_large",
        "A schema, a grammar or the tools have too many bytes.",
        "Shorten it. [The limits](../input-format.md#what-clients-may-not-send) are settings.",
    ),
    Code(
        "context_length_exceeded",
        "Deep validation: the prompt is longer than the model's context, or leaves no room in it "
        "for an answer; or the limit of the answer's tokens is larger than the whole context.",
        "Shorten the prompt or lower the limit, raise `--max-model-len` of the engine, or ask for "
        "`on_invalid` `error_file` to run the other lines.",
    ),
    Code(
        "invalid_json_schema",
        "Deep validation: the engine's structured outputs cannot make answers of this schema, "
        "expression, grammar or choice.",
        "Correct it. The message has the engine's own reason.",
    ),
    Code(
        "unknown_parameter",
        "Deep validation: the engine ignores a field of the line, because its request models do "
        "not have it.",
        "Correct or remove the field: see `field_ignored` below.",
    ),
    Code(
        "too_many_embedding_inputs",
        "The file has more texts to embed than `BATCHYARD_LIMITS__MAX_EMBEDDING_INPUTS`.",
        "Split the file at this line.",
    ),
    Code(
        "too_many_tasks",
        "A client's file has more requests than `BATCHYARD_LIMITS__MAX_REQUESTS`.",
        "Split the file, or raise the setting.",
    ),
    Code(
        "template_failed",
        "The template fails for this row of the dataset: the message says where.",
        "Correct the template, for example `{{ column | default('') }}` for a column that may be "
        "missing, or the row.",
    ),
    Code(
        "template_invalid_json",
        "The template does not make a JSON object from this row.",
        "Write values as `{{ column | tojson }}`, without quotes around them.",
    ),
    Code(
        "template_limit",
        "The template takes too long or too much memory for this row, or makes too long a line.",
        "Make the template simpler. [The limits](../how-to/datasets.md#limits).",
    ),
    Code("empty_file", "The file has no request.", "Check what was uploaded."),
    Code(
        "more_errors",
        "More lines are bad than are listed; the message says how many.",
        "Correct what is listed. `batchyard estimate FILE` lists the first thousand.",
    ),
)

WARNINGS: Final = (
    Code(
        "field_ignored",
        "Lines have a field that the engine ignores, as its own description says.",
        "Correct or remove it. vLLM 0.12 and later take `structured_outputs` in place of "
        "`guided_json`, `guided_choice`, `guided_regex` and `guided_grammar`. What is in "
        "`extra_body`, an argument of OpenAI's SDK, belongs into the body itself. With [deep "
        "validation](../input-format.md#deep-validation) such lines are bad ones.",
    ),
    Code(
        "fewer_answers",
        "Lines ask for several answers by `n`, and got fewer: the server ignores it.",
        "Send a line for each answer, or use another server.",
    ),
    Code(
        "url_expires_early",
        "A presigned URL for a result file expires before the batch will probably be done.",
        "Give a new one: [`POST /v1/batches/{id}/results`](../how-to/use-the-api.md#other-urls), "
        "or `batchyard results BATCH -o URL`.",
    ),
    Code(
        "waits_for_quota",
        "The quota of enqueued requests or tokens has no room for the batch, and the operator lets "
        "batches wait. Its window goes on.",
        "Wait until earlier batches are done, cancel one of them, or ask for a larger quota. "
        "[Quotas](../how-to/operate-batches.md#quotas).",
    ),
    Code(
        "url_not_checked",
        "It is not known whether a presigned URL takes the file: its server does not answer or may "
        "not be asked, or the URL has the checksum of another content.",
        "Check what the message says of the URL. The results are kept in any case. "
        "[Presigned URLs](../how-to/use-the-api.md#presigned-urls).",
    ),
    Code(
        "not_delivered",
        "The batch has ended, and a result file is not at its destination.",
        "If its server did not answer, it is tried again: see `GET /v1/deliveries?batch_id=…`. "
        "Otherwise give a new URL, or download the file.",
    ),
)

BATCH: Final = (
    Code(
        "invalid_dataset",
        "The dataset is not a Parquet, Arrow or JSON Lines file, its files do not have the same "
        "columns, or it has a type that cannot be kept.",
        "The message names the file. [What a dataset may be](../how-to/datasets.md#datasets).",
    ),
    Code(
        "dataset_too_large",
        "Rows of the dataset do not fit into the memory of the process that reads it.",
        "Write it with smaller row groups, or without columns that the template does not use.",
    ),
    Code(
        "template_limit",
        "The template takes too long or too much memory, and its process was ended.",
        "Make the template simpler. [The limits](../how-to/datasets.md#limits).",
    ),
    Code(
        "datasets_not_installed",
        "The process that reads the dataset has no pyarrow.",
        "`pip install 'batchyard[datasets]'` where the control workers run, or build the image "
        "with `--build-arg DATASETS=yes`.",
    ),
    Code(
        "input_not_read",
        "The process that reads a large input was ended three times, as the kernel does when "
        "memory is short.",
        "Look for its end in the kernel's log (`dmesg`), give the control worker more memory, then "
        "`batchyard retry BATCH`.",
    ),
    Code(
        "destination_refused",
        "A presigned URL for a result file would be refused: it is signed for another method or "
        "with another key, or its bucket does not exist or is in another region. Nothing was run.",
        "Make a URL for PUT, and create the batch again.",
    ),
    Code(
        "object_not_found",
        "The input is not where the batch says.",
        "Check the path, key or URL from the machine that the message names.",
    ),
    Code(
        "access_denied",
        "The input may not be read, or its presigned URL has expired.",
        "Make a new presigned URL, or correct the [S3 "
        "credentials](../how-to/configure-engines.md#credentials-for-buckets) or the file's mode.",
    ),
    Code(
        "location_refused",
        "The URL, path or redirect is one that Batchyard does not follow.",
        "The message says which rule it breaks. `BATCHYARD_INTERNAL_NETWORKS` opens private "
        "networks.",
    ),
    Code(
        "object_changed",
        "The input changed while it was read.",
        "Submit it again when it is complete.",
    ),
    Code(
        "error_threshold_reached",
        "The batch was stopped, because its failed requests reached its `error_threshold`.",
        "The error file says why they failed. Correct that, then `batchyard retry BATCH`, which "
        "also runs the lines that were not run.",
    ),
    Code(
        "file_too_large",
        "The input of a client has more bytes than `BATCHYARD_LIMITS__MAX_BYTES`.",
        "Split the file, or raise the setting.",
    ),
    Code(
        "storage_unavailable",
        "The object store or the input's host did not answer, after all retries.",
        "Check it with `batchyard doctor`, then submit the batch again or `batchyard retry` it.",
    ),
    Code(
        "storage_error",
        "The object store, a path or a URL failed in another way.",
        "The message has the reason; check with `batchyard doctor`.",
    ),
    Code(
        "storage_full",
        "There is no space left for the input or the results.",
        "Free space where the message says, then `batchyard retry BATCH`.",
    ),
    Code(
        "model_not_found",
        "No engine is set up for the model.",
        "`GET /v1/models` lists the models and their adapters. The operator adds one to the [file "
        "of models](../how-to/install.md#prefects-server) and runs `batchyard deploy`.",
    ),
    Code(
        "engine_start_failed",
        "No machine could start the model's engine.",
        "The message ends with the engine's own last lines. Correct the model's `options`, then "
        "`batchyard retry BATCH`.",
    ),
    Code(
        "engine_lost",
        "The engine crashed, and no machine could keep it running.",
        "Read the engine's log. Often it has too little memory: lower `--max-model-len` or "
        "`--gpu-memory-utilization`.",
    ),
    Code(
        "engine_error",
        "The engine failed in another way, or all of its first 100 answers were 401, 404 or "
        "redirects.",
        "The message has the reason; the engine's log has more. After 404 and redirects, check the "
        "[URL of the server](../how-to/configure-engines.md#the-url-of-a-server), after 401 its "
        "key, correct it, and run `batchyard retry`.",
    ),
    Code(
        "token_limit_exceeded",
        "With this batch the tenant would have more requests or tokens enqueued than its quota.",
        "Wait until other batches have ended, or ask the operator for a higher [quota]"
        "(../how-to/operate-batches.md#quotas).",
    ),
    Code(
        "storage_limit_exceeded",
        "With this input the tenant's files, responses and unfinished uploads would have more "
        "bytes than its quota.",
        "Delete files and responses that are no longer needed, or ask the operator for a higher "
        "[quota](../how-to/operate-batches.md#quotas).",
    ),
    Code(
        "window_unattainable",
        "By the forecast, the batch cannot be done in its window (`BATCHYARD_ADMISSION=refuse`).",
        "Create it with a longer `completion_window`, or split it.",
    ),
    Code(
        "store_unavailable",
        "The database cannot be reached or stays locked.",
        "Check it with `batchyard doctor`. Batches wait for it; only `batchyard run` ends.",
    ),
    Code(
        "dispatch_failed",
        "Prefect's API cannot be reached, or refused a call.",
        "Check `PREFECT_API_URL` and `PREFECT_API_AUTH_STRING` with `batchyard doctor`.",
    ),
    Code(
        "not_found",
        "A row that the batch needs was deleted.",
        "Submit the batch again.",
    ),
    Code(
        "server_error",
        "A defect of Batchyard. Finished lines are kept.",
        "`batchyard retry BATCH`, and report the message: it says where, without data of the "
        "batch.",
    ),
)

API: Final = (
    Code(
        "invalid_api_key",
        "The key is unknown, revoked or expired. Without any key the answer is a 401 without a "
        "code.",
        "`batchyard keys list` shows the keys, `batchyard keys create` makes one.",
        "401",
    ),
    Code(
        "insufficient_permissions",
        "The key is read-only, and the request would create, change or delete something. Or it "
        "is a live request, and the tenant's limit of these is 0.",
        "Use a key that was made without `--read-only`. The operator allows live requests with "
        "`batchyard tenants quota TENANT --live-requests 16`.",
        "403",
    ),
    Code(
        "csrf_failed",
        "A form of the page was sent without the token of its session.",
        "Load the page again, and send the form once more.",
        "403",
    ),
    Code(
        "missing_required_parameter",
        "A parameter is missing.",
        "Send the one that `param` names.",
        "400",
    ),
    Code(
        "invalid_template",
        "A template is not valid Jinja2, is too long, includes other templates, or, in a further "
        "stage, uses an unknown variable.",
        "The message says what is wrong, and in which line of it; `param` names the stage.",
        "400",
    ),
    Code("unknown_parameter", "There is no such parameter.", "Remove it.", "400"),
    Code(
        "invalid_type", "A parameter has the wrong type.", "The message names the right one.", "400"
    ),
    Code(
        "invalid_value",
        "A parameter has a value that is not possible.",
        "The message says what is possible.",
        "400",
    ),
    Code(
        "string_above_max_length",
        "A text is too long, such as a name, a URL or a metadata value.",
        "Shorten it; the message has the limit.",
        "400",
    ),
    Code("integer_below_min_value", "A number is too small.", "The message has the limit.", "400"),
    Code("integer_above_max_value", "A number is too large.", "The message has the limit.", "400"),
    Code(
        "object_above_max_properties",
        "`metadata` has more than 16 pairs.",
        "Leave some out.",
        "400",
    ),
    Code("empty_string", "A text is empty, such as `input_file_id`.", "Check what is sent.", "400"),
    Code("empty_array", "A list, such as `requests`, is empty.", "Check what is sent.", "400"),
    Code(
        "array_above_max_length",
        "A list, such as `requests` or `input_file_ids`, is too long.",
        "Split it over several batches; the message has the limit.",
        "400",
    ),
    Code("empty_file", "The uploaded file has no request.", "Check what is uploaded.", "400"),
    Code(
        "invalid_file",
        "The uploaded file is compressed, and damaged or cut off.",
        "Compress it with gzip or zstd again.",
        "400",
    ),
    Code(
        "invalid_json_line",
        "The first line of the uploaded file is not JSON.",
        "Write one JSON object on each line.",
        "400",
    ),
    Code(
        "invalid_purpose",
        "`purpose` is not one of OpenAI's. OpenAI sends no code for it, so `code` is null.",
        "Use `batch` for inputs of batches.",
        "400",
    ),
    Code(
        "invalid_file_format",
        "The name of a batch's input does not end with `.jsonl`. `code` is null, as with OpenAI.",
        "Rename the file.",
        "400",
    ),
    Code(
        "model_not_found",
        "Creating a batch: no engine is set up for `model` (400). Reading a model: there is no "
        "such model (404). Live requests: there is none, or its engine is not live (404).",
        "`GET /v1/models` lists the models.",
        "400, 404",
    ),
    Code(
        "email_not_configured",
        "`notify_email` is given, and the server sends no e-mail.",
        "Leave it out, or have the operator set `BATCHYARD_SMTP__HOST`.",
        "400",
    ),
    Code(
        "webhook_endpoint_limit_exceeded",
        "The tenant has as many webhook endpoints as it may have.",
        "Delete one first.",
        "400",
    ),
    Code(
        "webhook_endpoint_unreachable",
        "The sample event did not arrive.",
        "The message says why: an address that is not public, a certificate, a time-out.",
        "400",
    ),
    Code(
        "no_such_result",
        "The batch has no such file, or it is no longer kept.",
        "Look at `output_file_id` and `error_file_id` of the batch.",
        "400",
    ),
    Code(
        "batch_not_ended",
        "The files of the batch are being made.",
        "Ask again when the batch has ended.",
        "409",
    ),
    Code(
        "result_not_ready",
        "The request with this `custom_id` is not finished yet; or the batch has not ended, and so "
        "has no ledger.",
        "Ask again later, or read the [results in their order]"
        "(../how-to/use-the-api.md#results-while-a-batch-runs).",
        "404",
    ),
    Code(
        "custom_id_not_found",
        "The batch has no request with this `custom_id`.",
        "Compare it with the input, character by character. In a path it is percent-encoded.",
        "404",
    ),
    Code(
        "results_gone",
        "The result files of the batch were deleted or have expired.",
        "Nothing brings them back. `output_expires_after` of the next batch sets how long they "
        "are kept.",
        "404",
    ),
    Code(
        "resource_unavailable",
        "A live request with `service_tier` `flex` has waited, and the engine has no place to "
        "spare.",
        "Ask again later (OpenAI's SDKs do so twice), without `service_tier`, or in the "
        "[background](../how-to/background-responses.md).",
        "429",
    ),
    Code(
        "no_ledger",
        "The batch was created without `ledger`.",
        "Create the next one [with it](../how-to/accounts.md#the-ledger-of-a-batch). The result "
        "files of this one have the usage of each answer.",
        "404",
    ),
    Code(
        "input_gone",
        "The input of the batch is no longer kept, so the order of its lines is not known.",
        "Read the results with `order=completion`, or download the two files.",
        "400",
    ),
    Code(
        "idempotency_conflict",
        "The `Idempotency-Key` belongs to an earlier request with another body.",
        "Use a new key for a new request.",
        "409",
    ),
    Code(
        "file_too_large",
        "The upload has more bytes than its purpose allows.",
        "Split the file, or raise `BATCHYARD_LIMITS__MAX_BYTES`.",
        "413",
    ),
    Code(
        "storage_limit_exceeded",
        "With this upload, these lines or this background response, the tenant's files, responses "
        "and unfinished uploads would have more bytes than its quota.",
        "Delete files and responses that are no longer needed, or ask the operator for a higher "
        "quota.",
        "413",
    ),
    Code(
        "rate_limit_exceeded",
        "A quota of the tenant: batches per hour, active batches, enqueued requests or tokens, "
        "live requests in flight.",
        "Wait for `Retry-After` seconds, or ask the operator for a higher quota.",
        "429",
    ),
    Code(
        "window_unattainable",
        "By the forecast, the batch cannot be done in its window (`BATCHYARD_ADMISSION=refuse`).",
        "Use a longer `completion_window`, or split the file.",
        "429",
    ),
    Code(
        "engine_unavailable",
        "No engine of the model takes live requests at this moment: it is starting, or full.",
        "The SDKs try again. If it lasts, the operator looks at `batchyard models` and at the flow "
        "run of `run-chunks` in Prefect.",
        "503",
    ),
    Code(
        "engine_lost",
        "The engine crashed with the live request in it. In a stream this is an event with "
        "`error`.",
        "Send it again. If it happens again with this request only, the request is the cause: the "
        "engine's log has more.",
        "503",
    ),
    Code(
        "request_timeout",
        "The engine took longer for the live request than `BATCHYARD_REQUEST_TIMEOUT_SECONDS`. In "
        "a stream this is an event with `error`.",
        "Lower `max_tokens`, or raise the setting for the API and the GPU workers. The SDKs do not "
        "try again.",
        "504",
    ),
    Code(
        "store_unavailable",
        "The database does not answer.",
        "The SDKs try again. The operator looks at the API's log and `batchyard doctor api`.",
        "503",
    ),
    Code(
        "storage_unavailable",
        "The object store does not answer.",
        "The same as for `store_unavailable`.",
        "503",
    ),
    Code(
        "storage_full",
        "The object store has no space left.",
        "The operator frees space. The SDKs try again after a minute.",
        "503",
    ),
    Code(
        "dispatch_failed",
        "Prefect's API does not answer.",
        "The same as for `store_unavailable`.",
        "503",
    ),
)

COMMANDS: Final = (
    Code(
        "batch_limit_exceeded",
        "The tenant has as many active batches as its quota allows.",
        "Wait until one has ended, or ask the operator for a higher quota.",
    ),
    Code(
        "invalid_setting",
        "A setting has no usable value, or there is no setting of that name.",
        "The message names the variable, and a likely name.",
    ),
    Code(
        "batch_not_finished",
        "`batchyard retry` of a batch that has not ended.",
        "Wait until it has ended, or cancel it.",
    ),
    Code(
        "batch_not_validated",
        "`batchyard retry` of a batch whose input was refused or never read.",
        "Correct the file and submit it as a new batch.",
    ),
    Code(
        "nothing_to_retry",
        "`batchyard retry` of a batch in which every request was answered, which holds "
        "background responses, or which is a part of a chain.",
        "Nothing: the results are complete. Clients ask for failed responses again.",
    ),
    Code(
        "nothing_to_merge",
        "`batchyard retry --merge` of a chain, whose answers are to requests of its last stage.",
        "`batchyard retry` without `--merge`.",
    ),
    Code(
        "file_gone",
        "`batchyard retry` of a batch whose files have expired or were deleted.",
        "Submit the requests that are missing as a new batch.",
    ),
)
