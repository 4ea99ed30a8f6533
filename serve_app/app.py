"""The Serve application: `import_path: serve_app.app:build` in serve_config.yaml.

Serve runs the builder in a task on the cluster. All that can be refused is refused here, in one
line, before an actor or a replica starts. No `from __future__ import annotations`: Serve reads the
annotation of `args` as a class, to validate the YAML against it.
"""

import logging

import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig
from ray.serve.exceptions import RayServeException

from configs.load import ConfigError, app_args
from configs.schema import AppArgs
from engine_actor.actor import EngineActor
from engine_actor.errors import CheckpointError
from serve_app.directory import engine_names
from serve_app.ingress_deployment import HEADROOM, Ingress, IngressSettings, max_live_sequences
from serve_app.placement import Placement, installed_torch_cuda, place
from serve_app.preflight import Verified, verify

log = logging.getLogger("ray.serve")


def build(args: AppArgs) -> serve.Application:
    """The application for these arguments, the environment's overrides put in.

    Raises RayServeException, one line, for a bad setting, checkpoint or device.
    """
    try:
        checked = app_args(args)
        placement = place(checked.engine, _cluster_gpus(), installed_torch_cuda())
        verified = verify(checked)
    except (ConfigError, CheckpointError) as error:
        raise RayServeException(str(error)) from None
    log.info("engines on %s (%s), %s", placement.device, placement.why, verified.weights)
    return _application(verified, placement)


def _application(verified: Verified, placement: Placement) -> serve.Application:
    decided = verified.args.engine.model_copy(update={"device": placement.device})
    args = verified.args.model_copy(update={"engine": decided})
    # Plain dicts: Serve would turn pydantic models in an actor's arguments into dicts by itself.
    plain = args.model_dump(mode="json")
    names = engine_names(args.engine.num_engines)
    settings = IngressSettings(
        plain,
        str(verified.folder),
        names,
        meta={"weights": verified.weights, "device": placement.device},
    )
    live = max_live_sequences(args)
    deployment = Ingress.options(  # type: ignore[attr-defined]
        num_replicas=len(names),
        max_ongoing_requests=live + HEADROOM,
        max_queued_requests=live + HEADROOM,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=args.engine.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=1,
        health_check_timeout_s=10,
        max_constructor_retry_count=3,
        deployment_actors=[
            DeploymentActorConfig(
                name=name,
                actor_class=EngineActor,
                init_kwargs={"name": name, "app_args": plain},
                actor_options=placement.actor_options,
            )
            for name in names
        ],
    )
    return deployment.bind(settings)


def _cluster_gpus() -> float:
    return float(ray.cluster_resources().get("GPU", 0))
