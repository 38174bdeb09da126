"""Train a model on the cheapest GPU capacity that finishes in time: trigger it from the UI, fill in the form.

Copy this file, change `code` to your own program (docs/how-to/your-own-program.md), and keep the rest.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

from gpucost.operators.training import SpotTrainingOperator

with DAG(
    dag_id="spot_training",
    schedule=None,
    catchup=False,
    tags=["gpucost"],
    doc_md=__doc__,
    render_template_as_native_obj=True,
    params={
        "name": Param("digits", type="string", title="Name", description="What to call this training in MLflow."),
        "code": Param("programs/digits", type="string", title="Code", description="Folder below include/."),
        "arguments": Param(
            ["--epochs", "12"], type="array", title="Arguments", description="For the program, one a line."
        ),
        "gpu_kinds": Param(["T4"], type="array", title="GPU kinds", description="Any of these will do, one a line."),
        "recipe": Param(
            "",
            type="string",
            title="Recipe",
            description="File below include/, such as recipes/mixed_precision.yaml; empty: as the program trains.",
            examples=["recipes/mixed_precision.yaml", "recipes/small_memory.yaml", "recipes/spot_careful.yaml"],
        ),
        "work_hours": Param(2.0, type="number", exclusiveMinimum=0, title="Work", description="Hours of training."),
        "launch_hours": Param(0.25, type="number", minimum=0, title="Launch", description="Hours to the first step."),
        "deadline_hours": Param(
            8.0, type="number", exclusiveMinimum=0, title="Deadline", description="Hours from now."
        ),
        "budget_usd": Param("5.00", type="string", title="Budget", description="Most that it may cost, USD."),
        "checkpoint_steps": Param(100, type="integer", minimum=1, title="Checkpoint every", description="Steps."),
        "seed": Param(0, type="integer", minimum=0, title="Seed"),
    },
) as dag:
    SpotTrainingOperator(
        task_id="train",
        deadline_hours="{{ params.deadline_hours }}",
        job={
            "name": "{{ params.name }}",
            "project": "spot_training",
            "code": "{{ params.code }}",
            "arguments": "{{ params.arguments }}",
            "recipe": "{{ params.recipe }}",
            "gpu": {"kinds": "{{ params.gpu_kinds }}"},
            "work_hours": "{{ params.work_hours }}",
            "launch_hours": "{{ params.launch_hours }}",
            "budget": "{{ params.budget_usd }} USD",
            "checkpoint": {"every_steps": "{{ params.checkpoint_steps }}"},
            "seed": "{{ params.seed }}",
        },
    )
