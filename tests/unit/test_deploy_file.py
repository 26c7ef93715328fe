"""The file of models: what it means, and what is refused before a server is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.errors import SettingsError
from batchyard.schedule.hours import Hours, HoursWindow
from batchyard.storage.bucket import S3Credentials
from batchyard.storage.cloud_bucket import AzureCredentials, GoogleCredentials
from batchyard.storage.hub_repository import HubCredentials
from blocks import RemoteEngineBlock, VllmEngineBlock
from commands.prefect.deploy_file import DeployFile, read_deploy_file
from tests.pages import block

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], DeployFile]:
    def read_text(text: str) -> DeployFile:
        (tmp_path / "models.toml").write_text(text)
        return read_deploy_file(tmp_path / "models.toml")

    return read_text


def test_a_model_with_a_base_url_is_on_a_server_that_runs_already(read) -> None:
    file = read('[[models]]\nmodel = "a"\n[[models]]\nmodel = "b"\nbase_url = "http://h/v1"\n')
    assert [type(each.block) for each in file.models] == [VllmEngineBlock, RemoteEngineBlock]


def test_the_page_about_live_requests_makes_a_live_block(read) -> None:
    (model,) = read(block("docs/how-to/serve-live.md", "live")).models
    assert isinstance(model.block, VllmEngineBlock)
    assert model.block.live


def test_the_page_about_live_requests_promises_their_users_a_latency(read) -> None:
    (model,) = read(block("docs/how-to/serve-live.md", "objective")).models
    assert isinstance(model.block, VllmEngineBlock)
    assert (model.block.ttft_ms, model.block.itl_ms) == (300, 60)


def test_the_file_of_the_page_can_be_read(read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LARGE_API_KEY", "sk-1")
    monkeypatch.setenv("S3_SECRET", "s3")
    file = read(block("docs/how-to/install.md", "models"))
    assert {each.name for each in file.models} == {"qwen-qwen3-8b", "org-large"}
    assert file.gpu_pools == ["gpu", "remote"]


def test_each_kind_of_bucket_has_its_table_of_credentials(
    read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_KEY", "a2V5")
    azure = '[azure]\naccount_name = "results"\naccount_key = { variable = "AZURE_KEY" }\n'
    hub = '[hub]\ntoken = { variable = "HF" }\n'
    monkeypatch.setenv("HF", "hf_token")
    file = read(f'{hub}{azure}[google]\nservice_account_key = "{{}}"\n[s3]\nregion = "eu"\n')
    assert [each.build() for each in file.credentials] == [
        S3Credentials(region="eu"),
        AzureCredentials(account_name="results", account_key="a2V5"),
        GoogleCredentials(service_account_key="{}"),
        HubCredentials(token="hf_token"),
    ]


def test_the_usual_pool_needs_no_name(read) -> None:
    file = read('[[models]]\nmodel = "a"\n[[models]]\nmodel = "b"\npool = "h200"\n')
    assert file.gpu_pools == ["gpu", "h200"]
    assert file.pool_of_model == {"b": "h200"}


def test_a_pool_may_be_slurms(read) -> None:
    file = read('[slurm.a100]\npartition = "a100"\ngpus = 2\ntime_limit = "4:00:00"\n')
    assert file.gpu_pools == ["gpu", "a100"]
    assert (file.slurm["a100"].partition, file.slurm["a100"].gpus) == ("a100", 2)


def test_a_model_may_have_hours(read) -> None:
    window = 'batch_hours = [{ cron = "0 20 * * 1-5", until = "06:00", timezone = "UTC" }]'
    file = read(f'[[models]]\nmodel = "a"\n{window}\n')
    hours = Hours((HoursWindow("0 20 * * 1-5", until="06:00"),))
    assert file.models[0].block.hours == hours


def test_settings_may_stand_beside_the_models(read) -> None:
    assert read('storage = "s3://b/p"\n[[models]]\nmodel = "a"\n').models[0].name == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[model]]\nmodel = "a"\n', "There is no setting model. Do you mean models"),
        ('[[models]]\nmodel = "a"\noption = ""\n', "the model a: There is no field option. Do you"),
        (
            '[[models]]\nmodel = "a"\ntune = true\n',
            "the model a: tune was withdrawn and has no effect. Leave it out.",
        ),
        (
            '[[models]]\nmodel = "a"\nkv_offload = 40\n',
            "the model a: kv_offload was withdrawn and has no effect. Use vLLM's own options: --",
        ),
        (
            '[[models]]\nmodel = "a"\nspeculation = "ngram"\n',
            "the model a: speculation was withdrawn and has no effect. Use vLLM's own option: --sp",
        ),
        (
            '[[models]]\nmodel = "a"\nbatch_hours = [{ cron = "0 20 * * 1-5" }]\n',
            "the model a: batch_hours.0: Value error, give duration or until",
        ),
        ("[[models]]\noptions = ''\n", "the model without a name: model: Field required"),
        ('[[models]]\nmodel = "a"\noptions = "\'"\n', "the model a: options: Value error, No clos"),
        ('[models]\nmodel = "a"\n', "must be a list of tables"),
        ('[[models]]\nmodel = "a"\npool = 1\n', "the pool of the model a must be a name"),
        ('[[models]]\nmodel = "a"\npool = "control"\n', "the pool control runs no engines"),
        (
            '[[models]]\nmodel = "a.b"\n[[models]]\nmodel = "a/b"\n',
            "several models have the block name a-b",
        ),
        (
            '[[models]]\nmodel = "a"\nadapters = { law = "/l" }\n[[models]]\nmodel = "law"\n',
            "the model a: its adapter law has the name of a model",
        ),
        (
            (
                '[[models]]\nmodel = "a"\nadapters = { law = "/l" }\n'
                '[[models]]\nmodel = "b"\nbase_url = "http://h"\nadapters = ["law"]\n'
            ),
            "the models a and b have adapters of one name, law: give each its own",
        ),
        (
            '[[models]]\nmodel = "a"\nadapters = { "/data/law" = "/l" }\n',
            "the model a: .*the adapter name '/data/law' must be like a model's",
        ),
        ("[engines_at_once]\ngpu = 'two'\n", "a number for each pool, such as gpu = 2"),
        (
            '[[models]]\nmodel = "m"\nlive = true\n[slurm.gpu]\n',
            "the model m: live requests cannot reach a job of Slurm",
        ),
        ("slurm = 1\n", r"\[slurm\] has a table for each pool, such as \[slurm.gpu\]"),
        ('[slurm]\npartition = "a"\n', r"\[slurm\] has a table for each pool"),
        (
            '[slurm.gpu]\npartitions = "a"\n',
            r"\[slurm.gpu\]: There is no option partitions. Do you mean partition",
        ),
        ("[slurm.gpu]\ncpus = 0\n", r"\[slurm.gpu\]: cpus: Input should be greater than"),
        ("[slurm.control]\n", "the pool control runs no engines"),
        ("s3 = 1\n", r"\[s3\] must be a table"),
        (
            '[s3]\nsecret_access_key = { variable = "NO_SUCH_VARIABLE" }\n',
            "secret_access_key is in the variable NO_SUCH_VARIABLE, which is not set",
        ),
        (
            '[s3]\nsecret_access_key = { env = "X" }\n',
            'secret_access_key is a text, or { variable = "NAME" }',
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(read, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        read(text)
    assert "models.toml" in str(refused.value)


def test_a_secret_is_not_quoted_when_its_block_is_refused(
    read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "sk-canary")
    with pytest.raises(SettingsError, match="max_num_seqs") as refused:
        read(
            '[[models]]\nmodel = "a"\nbase_url = "http://h/v1"\nmax_num_seqs = -1\n'
            'api_key = { variable = "KEY" }\n'
        )
    assert "canary" not in str(refused.value)
