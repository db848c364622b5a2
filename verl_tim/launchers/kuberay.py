"""A RayJob for the KubeRay operator (ray.io/v1): a Ray cluster of its own for the run, gone when the run has ended."""

from __future__ import annotations

from importlib import metadata
from pathlib import PurePosixPath
from typing import Any

from verl_tim.launch.cluster import KEY
from verl_tim.launch.errors import LaunchError
from verl_tim.launchers.job import Job
from verl_tim.launchers.shell import driver, prelude, time_for_the_run
from verl_tim.launchers.yaml_text import dump

_SCRIPTS = "/etc/verl-tim"


def manifest(job: Job) -> str:
    """Two documents: a ConfigMap with the shell scripts, and the RayJob that mounts and runs them.

    The scripts stand in files because an entrypoint passes through two shells and Ray's own quoting, which no
    arbitrary word survives in every version.

    Raises:
        LaunchError: without an image, or with a mount that Kubernetes cannot make.
    """
    return dump([_scripts(job), ray_job(job)])


def _scripts(job: Job) -> dict[str, Any]:
    # the pod has the variables from its own `env`
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.name}-scripts"),
        "data": {
            "setup.sh": "#!/bin/bash\n" + prelude(job, variables=False) + "\nset +e\n",
            "run.sh": "#!/bin/bash\nset -e\n" + driver(job, stop_after=time_for_the_run(job)) + "\n",
        },
    }


def ray_job(job: Job) -> dict[str, Any]:
    """The RayJob. Every pod has the same image, GPUs, variables and mounts; the head is one of the nodes."""
    settings = job.settings
    if settings.image is None:
        raise LaunchError.of(
            f"{KEY}.image", "is not given, and a pod needs one", f"set {KEY}.image to an image with verl_tim and Ray"
        )
    labels = {} if settings.kubernetes.queue is None else {"kueue.x-k8s.io/queue-name": settings.kubernetes.queue}
    spec: dict[str, Any] = {
        "entrypoint": f"bash {_SCRIPTS}/run.sh",
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": settings.kubernetes.ttl,
        "backoffLimit": settings.restarts,
    }
    if settings.time_limit is not None:
        spec["activeDeadlineSeconds"] = settings.time_limit
    head: dict[str, Any] = {
        "rayStartParams": _start_params(job) | {"dashboard-host": "0.0.0.0"},
        "template": _pod(
            job,
            "ray-head",
            [("gcs-server", settings.ports.ray), ("dashboard", settings.ports.dashboard), ("client", 10001)],
        ),
    }
    if settings.ports.dashboard != 8265:
        head["rayStartParams"]["dashboard-port"] = str(settings.ports.dashboard)
    if settings.ports.ray != 6379:
        head["rayStartParams"]["port"] = str(settings.ports.ray)
    workers = {
        "groupName": "workers",
        "replicas": job.nodes - 1,
        "minReplicas": job.nodes - 1,
        "maxReplicas": job.nodes - 1,
        "rayStartParams": _start_params(job),
        "template": _pod(job, "ray-worker", []),
    }
    spec["rayClusterSpec"] = {
        "rayVersion": metadata.version("ray"),
        "headGroupSpec": head,
        **({"workerGroupSpecs": [workers]} if job.nodes > 1 else {}),
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(job, job.name, labels), "spec": spec}


def _metadata(job: Job, name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    place = {} if job.settings.kubernetes.namespace is None else {"namespace": job.settings.kubernetes.namespace}
    return {"name": name, **place, "labels": {"app.kubernetes.io/name": "verl-tim", **(labels or {})}}


def _start_params(job: Job) -> dict[str, str]:
    """Options of `ray start`, all text; KubeRay adds addresses and what the pod's limits say."""
    cpus = {} if job.ray_cpus is None else {"num-cpus": str(job.ray_cpus)}
    return {"num-gpus": str(job.gpus), **cpus, "disable-usage-stats": "true"}


def _pod(job: Job, name: str, ports: list[tuple[str, int]]) -> dict[str, Any]:
    settings, kubernetes = job.settings, job.settings.kubernetes
    volumes, mounts = _volumes(job)
    container: dict[str, Any] = {
        "name": name,
        "image": settings.image,
        # KubeRay puts these words in front of `ray start`, in the same shell: what setup.sh sets, Ray has
        "args": [f". {_SCRIPTS}/setup.sh"],
        "env": [
            *({"name": key, "value": value} for key, value in sorted(job.environment.items())),
            *(
                {
                    "name": key,
                    "valueFrom": {"secretKeyRef": {"name": kubernetes.secret, "key": key, "optional": True}},
                }
                for key in job.secrets
            ),
        ],
        "resources": _resources(job),
        "volumeMounts": mounts,
    }
    if ports:
        container["ports"] = [{"name": label, "containerPort": port} for label, port in ports]
    spec: dict[str, Any] = {"containers": [container], "volumes": volumes}
    if kubernetes.node_selector:
        spec["nodeSelector"] = dict(kubernetes.node_selector)
    if kubernetes.tolerate_gpu_taint and not job.cpu:
        spec["tolerations"] = [{"key": kubernetes.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]
    if kubernetes.service_account is not None:
        spec["serviceAccountName"] = kubernetes.service_account
    if kubernetes.image_pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": kubernetes.image_pull_secret}]
    if kubernetes.host_network:
        spec["hostNetwork"] = True
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    return {"metadata": {"labels": {"app.kubernetes.io/name": "verl-tim"}}, "spec": spec}


def _resources(job: Job) -> dict[str, Any]:
    """Requests equal limits: a training pod shares its node with nobody it would have to yield to."""
    settings = job.settings
    amounts: dict[str, Any] = {}
    if settings.cpus is not None:
        amounts["cpu"] = settings.cpus
    if settings.memory is not None:
        amounts["memory"] = f"{settings.memory}Gi"
    if not job.cpu:
        amounts[settings.kubernetes.gpu_resource] = job.gpus
    amounts |= settings.kubernetes.resources
    return {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {}


def _volumes(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes of the pod, and where its container has them."""
    memory: dict[str, Any] = {"medium": "Memory"}
    if job.settings.shm is not None:
        memory["sizeLimit"] = f"{job.settings.shm}Gi"
    # without it /dev/shm has 64 MB, where NCCL and Ray's objects need gigabytes
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": memory},
        {"name": "scripts", "configMap": {"name": f"{job.name}-scripts"}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "scripts", "mountPath": _SCRIPTS, "readOnly": True},
    ]
    names: dict[str, str] = {}
    for target, source in job.settings.mounts.items():
        if source.startswith("/"):
            volume: dict[str, Any] = {"hostPath": {"path": str(PurePosixPath(source))}}
        elif source.startswith("pvc:"):
            volume = {"persistentVolumeClaim": {"claimName": source.removeprefix("pvc:")}}
        else:
            raise LaunchError.of(
                f"{KEY}.mounts.{target}", f"is {source}, which Kubernetes cannot mount", "give /FOLDER or pvc:CLAIM"
            )
        if source not in names:
            names[source] = f"mount-{len(names)}"
            volumes.append({"name": names[source], **volume})
        mounts.append({"name": names[source], "mountPath": target})
    return volumes, mounts
