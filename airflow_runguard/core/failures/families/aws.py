"""AWS through botocore, by code and never by status: a throttle and a hard limit are both 400.

Botocore's own list of throttles is the base; what only caps the number of things is none of them, though the names are
alike. DynamoDB's cancelled transactions name one code an item.
"""

from airflow_runguard.core.failures.rule import Family, cap, daily, open_end, prose, rate, refused, undone, words
from airflow_runguard.core.record import FailureClass

THROTTLES = words(
    """Throttling ThrottlingException ThrottledException RequestThrottledException RequestThrottled ThrottlingError
    TooManyRequestsException ProvisionedThroughputExceededException ProvisionedThroughputExceeded RequestLimitExceeded
    BandwidthLimitExceeded LimitExceededForAPI SlowDown EC2ThrottledException PriorRequestNotComplete
    KMSThrottlingException ConcurrentModificationThrottled ModelNotReadyException RequestRateTooLarge
    TooManyRequests ReadThrottled WriteThrottled QueueOverflow InternalServerThrottle AccountThrottled"""
)
FAMILY = Family(
    "AWS",
    "https://docs.aws.amazon.com/boto3/latest/guide/retries.html",
    packages=frozenset({"botocore", "boto3", "aiobotocore"}),
    hosts=(".amazonaws.com", ".amazonaws.com.cn", ".api.aws"),
    headers=("x-amzn-", "x-amz-"),
    rules=(
        cap(
            "aws-account",
            "the account is suspended, not signed up or not paid",
            codes=words(
                """AccountProblem AccountSuspendedException SendingPausedException AccountSendingPausedException
                OptInRequired SubscriptionRequiredException NotSignedUp InvalidPayer PaymentRequiredException
                AccountSetupInProgress AccountSuspended AccountSendingPaused ConfigurationSetSendingPaused"""
            ),
        ),
        daily(
            "aws-ses-day",
            "the messages of the day are used up",
            codes=words("Throttling ThrottlingException LimitExceededException"),
            text=prose(r"daily message quota"),
        ),
        daily(
            # Of one mail among many; its own words are in SendBulkEmail's answer.
            "aws-ses-day-by-code",
            "the messages of the day are used up",
            codes=words("AccountDailyQuotaExceeded"),
        ),
        open_end(
            "aws-transaction-in-progress",
            "a transaction with the same token is under way, which may be an earlier attempt of this very work",
            failure_class=FailureClass.QUOTA,
            pausable=True,
            codes=words("TransactionInProgressException"),
        ),
        refused(
            "aws-transaction-refused",
            "the transaction was cancelled whole, since one of its conditions or values is wrong",
            codes=words("TransactionCanceledException"),
            also=words("ConditionalCheckFailed ValidationError ItemCollectionSizeLimitExceeded DuplicateItem"),
        ),
        rate(
            "aws-transaction-throttled",
            "the transaction was cancelled whole, since a table was too busy",
            codes=words("TransactionCanceledException"),
            also=THROTTLES,
        ),
        undone(
            "aws-transaction-conflict",
            "the transaction was cancelled whole, since another one touched the same items",
            codes=words("TransactionCanceledException TransactionConflictException"),
        ),
        rate(
            "aws-throttled-list",
            "too many requests for this moment; the name is that of a hard limit, but this operation has only a rate",
            codes=words("LimitExceededException"),
            also=words(
                """operation=DescribeStream operation=DescribeStreamSummary operation=ListShards operation=ListStreams
                operation=ListStreamConsumers operation=GetShardIterator operation=ListTagsForStream"""
            ),
        ),
        rate(
            "aws-throttled",
            "too many requests for this moment",
            codes=THROTTLES,
        ),
        rate(
            "aws-s3-busy",
            "the bucket gets too many requests for this moment",
            codes=words("ServiceUnavailable"),
            text=prose(r"reduce your request rate"),
        ),
        cap(
            "aws-limit",
            "a limit on what may exist is reached; something must be removed or the limit raised",
            # InstanceLimitExceeded, ServiceQuotaExceededException, TooManyBuckets, ResourceLimitExceeded, …
            code_like=prose(
                r"^(?!.*(request|rate|throughput|bandwidth)).*(limitexceeded|quotaexceeded)(exception|fault)?$"
                r"|^toomany(buckets|entities|accesspoints|hostedzones|tags)|^codestorageexceeded"
            ),
        ),
        open_end(
            "aws-model-failed",
            "the model failed while it worked on the request",
            codes=words("ModelErrorException ModelStreamErrorException"),
        ),
        open_end(
            "aws-timeout",
            "no answer in time; the service may have done the work",
            failure_class=FailureClass.TIMEOUT,
            codes=words("RequestTimeout RequestTimeoutException ModelTimeoutException"),
        ),
        refused(
            "aws-refused",
            "AWS refused the request as it stands",
            codes=words(
                """AccessDenied AccessDeniedException UnauthorizedOperation AuthFailure InvalidClientTokenId
                UnrecognizedClientException ExpiredToken ExpiredTokenException SignatureDoesNotMatch
                InvalidSignatureException RequestTimeTooSkewed ValidationException ValidationError
                InvalidParameterValue InvalidParameterException ResourceNotFoundException NoSuchBucket NoSuchKey
                MissingAuthenticationToken ConditionalCheckFailedException MessageRejected"""
            ),
        ),
    ),
)
