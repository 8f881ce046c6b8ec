"""JobSet v1alpha2 as a JSON schema, strict: written by hand from the fields that its API reference publishes.

No package of the registries carries the CRD itself. A Job's own spec is not described here: kubernetes-validate has it.
"""


def record(required=(), **properties) -> dict:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def listed(items: dict, **more) -> dict:
    return {"type": "array", "items": items, **more}


TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
WORDS = {"type": "object", "additionalProperties": TEXT}
DNS_LABEL = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}
ACTIONS = (
    "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob", "RestartJobAndIgnoreMaxRestarts",
)  # fmt: skip

RULE = record(
    ("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": list(ACTIONS)},
    onJobFailureReasons=listed(
        {
            "enum": [
                "BackoffLimitExceeded",
                "DeadlineExceeded",
                "FailedIndexes",
                "MaxFailedIndexesExceeded",
                "PodFailurePolicy",
            ]
        },
        uniqueItems=True,
    ),
    onJobFailureMessagePatterns=listed(TEXT, uniqueItems=True),
    targetReplicatedJobs=listed(TEXT),
)
REPLICATED = record(
    ("name", "template"),
    name=DNS_LABEL,
    groupName=DNS_LABEL,
    replicas=COUNT,
    template=record(("spec",), metadata={"type": "object"}, spec={"type": "object"}),
    dependsOn=listed(record(("name", "status"), name=TEXT, status={"enum": ["Ready", "Complete"]}), maxItems=5),
)
SPEC = record(
    (),
    replicatedJobs=listed(REPLICATED, minItems=1),
    network=record((), enableDNSHostnames=FLAG, subdomain=DNS_LABEL, publishNotReadyAddresses=FLAG),
    successPolicy=record(("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=listed(TEXT)),
    failurePolicy=record(
        (),
        maxRestarts=COUNT,
        restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
        rules=listed(RULE),
    ),
    suspend=FLAG,
    coordinator=record(("replicatedJob",), replicatedJob=TEXT, jobIndex=COUNT, podIndex=COUNT),
    managedBy=TEXT,
    ttlSecondsAfterFinished=COUNT,
)
JOBSET = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=record(("name",), name=DNS_LABEL, namespace=DNS_LABEL, labels=WORDS, annotations=WORDS),
    spec=SPEC,
)
