"""The events that may be logged and their fields: docs/reference/logs.md is made from it.

A test compares both tables with every call in the code. Names stay: operators' searches and alerts
have them.
"""

from __future__ import annotations

from typing import Final

EVENTS: Final = {
    "answer.not_judged": "An answer could not be checked for the batch's on_invalid_output; it"
    " counts as a good one.",
    "answer.not_read": "An engine's answer could not be read; its line is an error line.",
    "api.client_left": "A client closed the connection before its request was complete.",
    "api.failed": "A request was answered with 500 or above. A traceback means a defect.",
    "attachment.failed": "A line names an uploaded file that could not be sent to the engine; it "
    "is an error line.",
    "batch.at_risk": "By its forecast, a batch will miss its deadline.",
    "batch.began": "A flow run has begun to work on a batch.",
    "batch.collected": "The result files are in the object store.",
    "batch.counted": "A deep validation has counted the tokens of a batch's prompts.",
    "batch.fetched": "The input is in the object store.",
    "batch.input_gone": "A batch ended and its input can no longer be read, so lines without a "
    "result have no error line.",
    "batch.late_hours": "The completion window of a batch ends before the hours of its engine "
    "begin; it will expire.",
    "batch.lost": "The lease on a batch expired and another process has the batch.",
    "batch.not_cancelled": "A flow run was cancelled, but its batch could not be.",
    "batch.not_counted": "A deep validation could not count the tokens of all prompts; the text "
    "says why. The batch continues.",
    "batch.not_ended": "A flow run of a batch has ended and the batch has not; it is tried again.",
    "batch.not_released": "The lease on a batch could not be released; it expires by itself.",
    "batch.not_stopped": "A batch whose model no engine serves, or whose window has ended, could "
    "not be stopped; it is tried again.",
    "batch.notified": "A webhook or an e-mail of a batch was sent, or the attempt failed.",
    "batch.overdue": "The completion window of a batch has ended; it expires.",
    "batch.planned": "The requests are ordered and divided into chunks.",
    "batch.postponed": "A step of a batch failed for a temporary reason; the batch is tried again.",
    "batch.progress": "A further chunk is done.",
    "batch.read_again": "The process that reads the input of a batch was ended; another one reads "
    "it from its beginning.",
    "batch.running": "Runners have chunks of the batch.",
    "batch.status_changed": "The status of a batch changed in the middle of a step, for instance "
    "by a cancellation.",
    "batch.stopped": "A batch cannot continue. Its finished lines are in its files.",
    "batch.uploaded": "The result files are where they were asked for, or the text says why not.",
    "batch.validated": "Every line of the input is a request.",
    "batch.warned": "Its result files may not get to their destinations; the text says why.",
    "batch.waiting": "No runner has a chunk of the batch; the text says why.",
    "batches.left_to_others": "Prefect has made no flow run for this process for a minute, and "
    "answers another one; this process takes no further batches, and ends after those it has.",
    "batches.not_claimed": "The database gave no batches; it is asked again.",
    "batches.not_seen": "The database did not give the state of this process's batches; it "
    "is asked again.",
    "bounds.not_written": "What limited a batch could not be recorded; a part of it is missing.",
    "chain.not_seen": "The lines of a chain could not be handed to its next stage; it begins again "
    "from what is durable.",
    "chain.part_made": "Lines of a chain that have their answers are a batch of its next stage.",
    "chunk.failed": "A chunk failed; it is tried again, with fewer other chunks.",
    "chunk.given_back": "A chunk was released for other machines, because this one cannot save "
    "finished lines.",
    "chunk.lines_failed": "The process that ran a chunk ended too often: the lines that may be the "
    "cause are error lines.",
    "chunk.lost": "The lease on a chunk expired and another runner has the chunk.",
    "chunk.not_recorded": "The end of a chunk's task could not be recorded in Prefect.",
    "chunk.not_released": "A chunk could not be released; it is tried again.",
    "chunk.not_saved": "Finished lines of a chunk could not be saved yet; they are kept and tried "
    "again.",
    "chunk.postponed": "A chunk failed for a temporary reason; it was released.",
    "chunks.not_claimed": "The database gave no chunks; it is asked again.",
    "clock.set_back": "The clock of the database was set back: leases and heartbeats from before "
    "then were dated back by as much.",
    "deliveries.not_claimed": "The database gave no notifications to send; it is asked again.",
    "deliveries.not_sent": "Notifications could not be sent by this process.",
    "delivery.attempted": "A webhook, an e-mail, or a result file was sent, or the attempt failed.",
    "delivery.not_recorded": "The result of an attempt could not be recorded: the receiver may get "
    "the event again.",
    "delivery.not_shown": "A notification could not be shown in Prefect.",
    "endpoint.not_disabled": "A webhook endpoint that failed too often could not be disabled.",
    "engine.accepting": "A server that refused all requests takes them again.",
    "engine.busy": "A server that others use has no room; the batch waits.",
    "engine.cache_shared": "A server cannot separate tenants' prompt caches.",
    "engine.free": "A server that others use has room again; the batch continues.",
    "engine.log": "A line of a lost engine's log that says why it ended.",
    "engine.lost": "An engine ended or stopped answering; it is started again.",
    "engine.model_not_listed": "A server does not list the model; requests are sent nevertheless.",
    "engine.node_joined": "A machine has joined an engine over several machines.",
    "engine.node_lost": "A machine of an engine is lost, or its vLLM has ended: the engine "
    "is ended on all of them and started again.",
    "engine.node_refused": "A machine wanted to join an engine with another key.",
    "engine.objective": "A latency objective cannot be kept as it is written.",
    "engine.option_withdrawn": "An engine block asks for something that Batchyard had before; the "
    "engine is started without it.",
    "engine.ready": "An engine accepts requests.",
    "engine.recognised": "What kind of server one is that runs already.",
    "engine.refusing": "A server has refused all requests for a while; batches wait for it.",
    "engine.routes_not_read": "An engine did not say which endpoints it has.",
    "engine.seats_unknown": "A server does not say how many requests it runs at once.",
    "engine.servers_missed": "Some API servers of an engine took no connection; the others have "
    "all of its lines.",
    "engine.starting": "An engine was started.",
    "engine.stopped": "An engine was stopped.",
    "engine.usage_of_characters": "A server counts characters as tokens; so do usage and quotas.",
    "file.bytes_left": "The bytes of a deleted file remain for now; `expire-files` tries again.",
    "fields.not_noted": "Fields that the engine ignores could not be written to their batch.",
    "flow_run.lost": "A flow run's process is gone; Prefect was told that it crashed.",
    "flow_run.not_changed": "The name, the tags or the end of a flow run could not be set.",
    "flow_run.uses": "Which database, object store and Prefect a flow run uses.",
    "health.failed": "A check of /readyz failed.",
    "hours.not_read": "Prefect did not give the hours of an engine, or they are not valid: those "
    "that were read before apply.",
    "lease.not_renewed": "A lease could not be renewed; it is tried again until it expires.",
    "lengths.not_read": "Lengths of earlier answers could not be read; the batch continues "
    "without them.",
    "lengths.not_written": "Lengths of answers could not be written; they are written with the "
    "next ones.",
    "line.not_read": "A line of the input could not be read; it is an error line.",
    "live.broken_off": "An engine or its runner was lost in the middle of a live answer.",
    "live.lost": "The engine did not answer a live request to its end.",
    "live.not_counted": "What live requests used could not be recorded; it is tried again.",
    "live.not_open": "A runner cannot listen for live requests; it runs batches only.",
    "live.not_withdrawn": "A runner that ends could not take back its address for live requests; "
    "it ends with its heartbeat.",
    "live.open": "An engine takes live requests.",
    "login.failed": "A browser sent a key that is unknown, revoked or expired.",
    "metrics.not_published": "A process could not write its metrics for the exporter.",
    "metrics.not_read": "The figures for /metrics could not be read.",
    "model.not_offered": "No engine serves the model. The message says how an operator adds it.",
    "model.not_offered_now": "No engine serves the model at the moment, but one did before.",
    "models.not_known": "Prefect could not be asked which models are served.",
    "models.not_read": "Prefect could not be asked for the list of models.",
    "new_file.refused": "A file that was found in a folder could not become a batch; it is tried "
    "again by the next run.",
    "new_file.submitted": "A file that was found in a folder has become a batch.",
    "outcome.not_kept": "The result of a batch could not be kept in Prefect for other flows.",
    "outcome.not_known": "The result of a batch could not be read for other flows.",
    "output.not_checked": "A batch's JSON schemas take too long to check: some of its answers count"
    " as good ones unchecked.",
    "progress.not_seen": "The database did not say how far a batch is; it is asked again.",
    "progress.not_shown": "The progress of a batch could not be shown in Prefect.",
    "reconciler.failed": "A pass of `reconcile` failed; the next one follows.",
    "report.not_shown": "The report of a batch, or of new files, could not be shown in Prefect.",
    "request.failed": "An attempt at a request failed before the engine answered.",
    "responses.collected": "Background responses that waited are a batch now.",
    "responses.not_seen": "Background responses could not be collected or ended; the next look "
    "follows.",
    "result.not_accepted": "The chunk of a result could not accept it; the chunk fails.",
    "runner.adapters_missing": "Adapters were added to a block after its engine had started: the "
    "runner ends, and the next engine has them.",
    "runner.draining": "A runner was asked to end: another model gets its slot, or the hours of "
    "its engine are over.",
    "runner.ended": "A runner ended with an error.",
    "runner.held_up": "The object store does not take a runner's finished lines, or too slowly: it "
    "takes no more work until they are saved.",
    "runner.hours_over": "The hours of an engine ended: its runner finishes what is in flight.",
    "runner.lost": "A runner stopped renewing its registration; its chunks are released.",
    "runner.rate_not_read": "What prompts cost in earlier runs could not be read; it is guessed.",
    "runner.not_retired": "A runner that ended could not be marked as ended.",
    "runner.not_seen": "The database did not say whether a runner should continue; it is asked "
    "again.",
    "runner.not_started": "Prefect could not be asked for a process that runs batches.",
    "runner.resumed": "A runner could save its finished lines and takes work again.",
    "runner.not_needed": "A runner waited in a cluster's queue, and its model had no work left.",
    "runner.started": "A flow run of `run-chunks` was created for a model.",
    "scheduler.failed": "A look at which runners are needed failed; the next one follows.",
    "scheduler.waiting": "Prefect or the database could not be used for a model's runners.",
    "segment.damaged": "Saved results do not match their checksum; their lines are run again or "
    "are error lines.",
    "segments.missing": "Some saved results of a batch are not in the object store; their lines "
    "are error lines.",
    "service.away": "A database, object store or Prefect does not answer; the call is repeated.",
    "status_changes.not_reported": "Status changes could not be sent to Prefect; they are sent "
    "later.",
    "step.repeated": "A step of a batch failed for a temporary reason; it is repeated.",
    "storage.ahead": "The object store is newer than the database: a backup was restored.",
    "storage.not_marked": "The object store's mark could not be written.",
    "task_run.not_recorded": "A step of a batch could not be shown in Prefect.",
    "upload.bytes_left": "Parts of an upload could not be deleted; `expire-files` tries again.",
    "watch.failed": "Watchers of batches could not be served, by a defect; the next look follows.",
    "watch.not_read": "The database did not answer for those who watch batches; the next look "
    "follows.",
}

FIELDS: Final = {
    "about": "the model, or what else the scheduler was busy with",
    "address": "the network address of a client",
    "batch": "the id of the batch",
    "chunk": "the number of the chunk in its batch, from 0",
    "delivery": "the id of the notification",
    "destination": "the id of the webhook endpoint, or the channel; never a URL",
    "endpoint": "the id of the webhook endpoint",
    "error_code": "the code of an error",
    "event": "the type of a webhook's event",
    "exit": "the exit status of a process",
    "file": "the id of the file",
    "flow_run": "the id of the Prefect flow run",
    "kind": "the kind of a server, as the page of servers names it",
    "lines": "how many lines",
    "http_status": "the HTTP status of a receiver's answer",
    "key": "where an object is in the object store",
    "late_seconds": "how many seconds after the deadline",
    "log": "the path of a log file",
    "method": "the HTTP method",
    "model": "the model",
    "ms": "a duration in milliseconds",
    "node": "the name of a machine of an engine over several machines",
    "ordinal": "the place of the request in the order of the batch, from 0",
    "owner": "the process that has a lease",
    "part": "the id of a batch that holds lines of a chain",
    "path": "the path of a URL, without its query",
    "pool": "the Prefect work pool",
    "request": "the id in the header x-request-id of the answer",
    "request_id": "the id of the request to the engine",
    "requests": "a number of requests",
    "runner": "the id of the runner",
    "server": "the host of an engine that runs already",
    "servers": "how many API servers of an engine took a connection",
    "state": "the state of a Prefect flow run",
    "status": "the status of the batch or of the notification",
    "step": "the step of a batch",
    "strikes": "how often the chunk has failed",
    "tag": "the number of the request at the engine",
    "tenant": "the tenant",
    "vllm": "the version of vLLM",
    "what": "what was being done",
}
