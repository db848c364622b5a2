"""KubeRay and SkyPilot: what one cluster config becomes there, held against schemas."""

import copy

import pytest
import yaml

from verl_tim.launch.errors import LaunchError
from verl_tim.launchers import kuberay, ray_job, skypilot
from verl_tim.launchers.lint import LintError, lint, rayjob_schema, shell

SETTINGS = {
    "cpus": 96,
    "memory": 900,
    "shm": 128,
    "time_limit": 3600,
    "restarts": 2,
    "setup": ["source /opt/env/bin/activate"],
    "mounts": {"/shared": "pvc:shared", "/scratch": "/local/scratch"},
    "kubernetes": {"namespace": "rl", "queue": "lab", "resources": {"rdma/hca": 1}, "node_selector": {"gpu": "h200"}},
}


def ray_job_texts(job):
    return [ray_job.script(job)]


def kuberay_texts(job):
    scripts, _ = yaml.safe_load_all(kuberay.manifest(job))
    return list(scripts["data"].values())


def skypilot_texts(job):
    return [skypilot.task_of(job)["run"]]


@pytest.fixture
def manifest(job_with):
    return kuberay.ray_job(job_with(SETTINGS))


def containers(manifest):
    cluster = manifest["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    return [group["template"]["spec"]["containers"][0] for group in groups]


def test_the_head_is_one_of_the_nodes_and_all_have_the_same_gpus(manifest):
    (workers,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 1
    for container in containers(manifest):
        wanted = {"cpu": 96, "memory": "900Gi", "nvidia.com/gpu": 8, "rdma/hca": 1}
        assert container["resources"] == {"requests": wanted, "limits": wanted}
        assert container["image"] == "nvcr.io/verl:1"


def test_shared_memory_mounts_and_scripts_are_in_every_pod(manifest):
    for container in containers(manifest):
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
            "/dev/shm", "/etc/verl-tim", "/shared", "/scratch",
        }  # fmt: skip
    volumes = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Gi"}} in volumes
    assert {"name": "mount-0", "persistentVolumeClaim": {"claimName": "shared"}} in volumes
    assert {"name": "mount-1", "hostPath": {"path": "/local/scratch"}} in volumes


def test_secrets_are_references_and_variables_are_values(manifest):
    for container in containers(manifest):
        assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
        secret = {"name": "verl-tim", "key": "HF_TOKEN", "optional": True}
        assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}} in container["env"]


def test_time_and_restarts_are_the_jobs(manifest, job_with):
    assert manifest["spec"]["activeDeadlineSeconds"] == 3600
    assert manifest["spec"]["backoffLimit"] == 2
    scripts, _ = yaml.safe_load_all(kuberay.manifest(job_with(SETTINGS)))
    # the run is asked to stop before the deadline, which would just delete the pods
    assert "timeout --signal=TERM --kill-after=60 3480 verl-tim train" in scripts["data"]["run.sh"]


def test_one_node_has_no_worker_group(job_with):
    assert "workerGroupSpecs" not in kuberay.ray_job(job_with(nodes=1))["spec"]["rayClusterSpec"]


def test_a_pod_without_an_image_is_refused(job_with):
    with pytest.raises(LaunchError, match=r"tim\.launch\.image: is not given"):
        kuberay.manifest(job_with({"image": None}))


@pytest.mark.parametrize(
    "fields", [{}, {"nodes": 1}, {"cpu": True, "ray_cpus": 16}, {"environment": {}, "secrets": ()}]
)
def test_it_fits_the_schema(job_with, fields):
    job = job_with(SETTINGS, **fields)
    assert "RayJob schema" in lint("kuberay", kuberay.manifest(job), job)


def _set(path, value):
    def change(manifest):
        node = manifest
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


HEAD = ("spec", "rayClusterSpec", "headGroupSpec")
CONTAINER = (*HEAD, "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    "spoil",
    [
        _set(("apiVersion",), "ray.io/v1alpha1"),
        _set(("metadata", "name"), "Run_1"),
        _set(("metadata", "name"), "x" * 48),
        _set(("spec", "entryPoint"), "bash"),
        _set(("spec", "backoffLimit"), "2"),
        _set((*HEAD, "rayStartParams", "num-gpus"), 8),
        _set((*HEAD, "replicas"), 1),
        _set((*CONTAINER, "env", 0, "value"), 1),
        _set((*CONTAINER, "resources", "limits", "memory"), "900 GiB"),
        _set((*CONTAINER, "ports", 0, "name"), "a-name-that-is-too-long"),
        _set((*CONTAINER, "volumeMounts", 0, "mountPath"), "shared"),
    ],
)
def test_the_schema_can_fail(manifest, spoil):
    spoilt = copy.deepcopy(manifest)
    spoil(spoilt)
    with pytest.raises(LintError, match="RayJob"):
        rayjob_schema(spoilt)


def test_kubernetes_own_client_knows_every_field_of_a_pod(manifest):
    """The classes that Kubernetes generates from its API know the names and types of all fields."""
    models = pytest.importorskip("kubernetes.client.models")

    def fields(kind):
        model = getattr(models, kind)
        return {name: model.openapi_types[field] for field, name in model.attribute_map.items()}

    def check(value, kind):
        outer = kind.lower().partition("[")[0]  # list[...] or List[...], by version
        if outer == "list":
            assert isinstance(value, list)
            for one in value:
                check(one, kind[5:-1])
        elif outer == "dict" or kind.startswith("dict("):
            assert isinstance(value, dict)
        elif hasattr(models, kind):
            known = fields(kind)
            assert set(value) <= set(known), kind
            for name, one in value.items():
                check(one, known[name])
        else:
            assert isinstance(value, {"str": str, "int": int, "bool": bool}[kind]), (value, kind)

    cluster = manifest["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        check(group["template"], "V1PodTemplateSpec")
    with pytest.raises(AssertionError):
        check({"spec": {"containers": [{"nam": "x"}]}}, "V1PodTemplateSpec")


def test_a_sky_task_asks_for_the_nodes_and_runs_ray_between_them(job_with):
    task = skypilot.task_of(
        job_with(
            {
                "cpus": 96,
                "memory": 900,
                "skypilot": {"infra": "aws/us-east-1", "use_spot": True, "setup": ["pip install ."]},
            }
        )
    )
    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "infra": "aws/us-east-1", "accelerators": "H200:8", "cpus": "96+", "memory": "900+",
        "image_id": "docker:nvcr.io/verl:1", "use_spot": True,
    }  # fmt: skip
    assert task["secrets"] == {"HF_TOKEN": None, "WANDB_API_KEY": None}
    assert task["setup"] == "#!/bin/bash\nset -e\npip install .\n"
    assert "SKYPILOT_NODE_RANK" in task["run"]


def test_a_sky_task_without_the_gpus_name_is_refused(job_with):
    with pytest.raises(LaunchError, match=r"tim\.launch\.gpu: is not given"):
        skypilot.task(job_with({"gpu": None}))


def test_buckets_and_volumes_are_mounted_by_sky_and_folders_are_refused(job_with):
    task = skypilot.task_of(job_with({"mounts": {"/data": "s3://bucket/x", "/shared": "volume:disk"}}))
    assert task["file_mounts"] == {"/data": "s3://bucket/x"}
    assert task["volumes"] == {"/shared": "disk"}
    with pytest.raises(LaunchError, match="SkyPilot cannot mount"):
        skypilot.task(job_with({"mounts": {"/data": "/local"}}))


@pytest.mark.parametrize("settings", [{}, {"restarts": 2, "time_limit": 3600}, {"mounts": {"/data": "s3://bucket"}}])
def test_skypilot_itself_takes_the_task(job_with, settings):
    pytest.importorskip("sky")
    job = job_with(settings)
    assert "sky.Task" in lint("skypilot", skypilot.task(job), job)


def test_a_broken_set_up_command_is_found_before_anything_is_submitted(job_with):
    job = job_with({"setup": ["if true"]})
    with pytest.raises(LintError, match="bash -n"):
        lint("kuberay", kuberay.manifest(job), job)


@pytest.mark.parametrize("settings", [{}, SETTINGS, {"time_limit": 3600}])
@pytest.mark.parametrize("render", [ray_job_texts, kuberay_texts, skypilot_texts])
def test_shellcheck_has_nothing_to_say_of_the_scripts_inside(job_with, render, settings):
    settings = {key: value for key, value in settings.items() if key != "mounts"}
    shell(render(job_with(settings)), severity="info")
