package kclrun;

import java.io.FileOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.reflect.Field;
import java.net.URI;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.TimeUnit;

import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.services.cloudwatch.CloudWatchAsyncClient;
import software.amazon.awssdk.services.dynamodb.DynamoDbAsyncClient;
import software.amazon.awssdk.services.kinesis.KinesisAsyncClient;
import software.amazon.kinesis.common.ConfigsBuilder;
import software.amazon.kinesis.common.InitialPositionInStream;
import software.amazon.kinesis.common.InitialPositionInStreamExtended;
import software.amazon.kinesis.common.KinesisClientUtil;
import software.amazon.kinesis.common.StreamConfig;
import software.amazon.kinesis.common.StreamIdentifier;
import software.amazon.kinesis.coordinator.CoordinatorConfig;
import software.amazon.kinesis.coordinator.Scheduler;
import software.amazon.kinesis.exceptions.InvalidStateException;
import software.amazon.kinesis.exceptions.ShutdownException;
import software.amazon.kinesis.leases.LeaseManagementConfig;
import software.amazon.kinesis.lifecycle.events.InitializationInput;
import software.amazon.kinesis.lifecycle.events.LeaseLostInput;
import software.amazon.kinesis.lifecycle.events.ProcessRecordsInput;
import software.amazon.kinesis.lifecycle.events.ShardEndedInput;
import software.amazon.kinesis.lifecycle.events.ShutdownRequestedInput;
import software.amazon.kinesis.metrics.NullMetricsFactory;
import software.amazon.kinesis.processor.FormerStreamsLeasesDeletionStrategy;
import software.amazon.kinesis.processor.MultiStreamTracker;
import software.amazon.kinesis.processor.RecordProcessorCheckpointer;
import software.amazon.kinesis.processor.ShardRecordProcessor;
import software.amazon.kinesis.processor.ShardRecordProcessorFactory;
import software.amazon.kinesis.processor.SingleStreamTracker;
import software.amazon.kinesis.processor.StreamTracker;
import software.amazon.kinesis.retrieval.KinesisClientRecord;
import software.amazon.kinesis.retrieval.RetrievalConfig;
import software.amazon.kinesis.retrieval.polling.PollingConfig;

/**
 * A consumer as the KCL's guide has it: the client of KinesisClientUtil (HTTP/2, CBOR), polling, or
 * by enhanced fan-out with -DfanOut=true.
 * It writes each record it is given to a ledger that all workers share. Settings are properties:
 * who, stream, table, kinesis, dynamodb, ledger; start (TRIM_HORIZON or LATEST); compatible (the
 * version that a KCL 3 is to be compatible with); holdAfter (checkpoint after so many records of a
 * shard, and then no more); failoverMs (instead of the KCL's ten seconds); cleanupMs (how often ended
 * leases are looked at). With several streams, streams is account:name:creation of each, with commas
 * between them, and the ledger has the stream's name before that of the shard.
 */
public final class LedgerConsumer {
    private static final String WHO = System.getProperty("who");
    private static final int HOLD_AFTER = Integer.getInteger("holdAfter", 0);
    private static final String STREAMS = System.getProperty("streams", "");
    private static FileOutputStream ledger;

    private LedgerConsumer() {}

    public static void main(String[] arguments) throws Exception {
        ledger = new FileOutputStream(System.getProperty("ledger"), true);
        var credentials =
                StaticCredentialsProvider.create(AwsBasicCredentials.create("AKIAEXAMPLE", "secret"));
        KinesisAsyncClient kinesis = KinesisClientUtil.createKinesisAsyncClient(
                KinesisAsyncClient.builder()
                        .endpointOverride(URI.create(System.getProperty("kinesis")))
                        .region(Region.US_EAST_1)
                        .credentialsProvider(credentials));
        URI dynamodbEndpoint = URI.create(System.getProperty("dynamodb"));
        DynamoDbAsyncClient dynamodb = DynamoDbAsyncClient.builder()
                .endpointOverride(dynamodbEndpoint)
                .region(Region.US_EAST_1)
                .credentialsProvider(credentials)
                .build();
        // No metric is sent: see the factory below.
        CloudWatchAsyncClient cloudwatch = CloudWatchAsyncClient.builder()
                .endpointOverride(dynamodbEndpoint)
                .region(Region.US_EAST_1)
                .credentialsProvider(credentials)
                .build();
        ConfigsBuilder configs = new ConfigsBuilder(
                tracker(),
                System.getProperty("table"),
                kinesis,
                dynamodb,
                cloudwatch,
                WHO,
                new Recorders());
        // The default of a minute is slept once, at the first start, and is no part of any claim.
        LeaseManagementConfig leases = configs.leaseManagementConfig().shardSyncIntervalMillis(1000);
        if (Long.getLong("failoverMs") != null) {
            leases.failoverTimeMillis(Long.getLong("failoverMs"));
        }
        cleanUpEvery(Long.getLong("cleanupMs", 0), leases);
        Scheduler scheduler = new Scheduler(
                configs.checkpointConfig(),
                compatible(configs.coordinatorConfig().parentShardPollIntervalMillis(2000)),
                leases,
                configs.lifecycleConfig(),
                configs.metricsConfig().metricsFactory(new NullMetricsFactory()),
                configs.processorConfig(),
                retrieval(configs, kinesis));
        Thread running = new Thread(scheduler, "scheduler");
        Runtime.getRuntime().addShutdownHook(new Thread(() -> stop(scheduler)));
        running.start();
        write("started", null, "");
        running.join();
    }

    private static StreamTracker tracker() {
        var start = InitialPositionInStreamExtended.newInitialPosition(
                InitialPositionInStream.valueOf(System.getProperty("start", "TRIM_HORIZON")));
        if (STREAMS.isEmpty()) {
            return new SingleStreamTracker(System.getProperty("stream"), start);
        }
        List<StreamConfig> streams = Arrays.stream(STREAMS.split(","))
                .map(stream -> new StreamConfig(StreamIdentifier.multiStreamInstance(stream), start))
                .toList();
        return new MultiStreamTracker() {
            @Override
            public List<StreamConfig> streamConfigList() {
                return streams;
            }

            @Override
            public FormerStreamsLeasesDeletionStrategy formerStreamsLeasesDeletionStrategy() {
                return new FormerStreamsLeasesDeletionStrategy.NoLeaseDeletionStrategy();
            }
        };
    }

    /** The KCL's default is enhanced fan-out, with a consumer named as the application. */
    private static RetrievalConfig retrieval(ConfigsBuilder configs, KinesisAsyncClient kinesis) {
        RetrievalConfig config = configs.retrievalConfig();
        if (Boolean.getBoolean("fanOut")) {
            return config;
        }
        PollingConfig polling = STREAMS.isEmpty()
                ? new PollingConfig(System.getProperty("stream"), kinesis)
                : new PollingConfig(kinesis);
        return config.retrievalSpecificConfig(polling.idleTimeBetweenReadsInMillis(500));
    }

    private static void stop(Scheduler scheduler) {
        try {
            scheduler.startGracefulShutdown().get(30, TimeUnit.SECONDS);
        } catch (Exception error) {
            System.err.println("the shutdown failed: " + error);
        }
    }

    /** The setting exists since KCL 3.0. */
    private static CoordinatorConfig compatible(CoordinatorConfig config) throws ReflectiveOperationException {
        String wanted = System.getProperty("compatible", "");
        if (!wanted.isEmpty()) {
            Class<?> kind = Class.forName(
                    "software.amazon.kinesis.coordinator.CoordinatorConfig$ClientVersionConfig");
            for (Object constant : kind.getEnumConstants()) {
                if (constant.toString().equals(wanted)) {
                    CoordinatorConfig.class.getMethod("clientVersionConfig", kind).invoke(config, constant);
                }
            }
        }
        return config;
    }

    /** The KCL has no setter for it; its defaults are 1, 5 and 30 minutes. */
    private static void cleanUpEvery(long intervalMs, LeaseManagementConfig leases)
            throws ReflectiveOperationException {
        if (intervalMs > 0) {
            Object config = leases.leaseCleanupConfig();
            for (String name : List.of("leaseCleanupIntervalMillis", "completedLeaseCleanupIntervalMillis")) {
                Field field = config.getClass().getDeclaredField(name);
                field.setAccessible(true);
                field.setLong(config, intervalMs);
            }
        }
    }

    /** One write a line, and a line feed before it, so that a line torn by SIGKILL spoils no other. */
    private static void write(String what, String shard, String more) {
        String line = "\n{\"what\":\"" + what + "\",\"who\":\"" + WHO + "\",\"shard\":"
                + (shard == null ? "null" : "\"" + shard + "\"") + more + "}\n";
        try {
            ledger.write(line.getBytes(StandardCharsets.UTF_8));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static final class Recorders implements ShardRecordProcessorFactory {
        @Override
        public ShardRecordProcessor shardRecordProcessor() {
            return new Recorder("");
        }

        @Override
        public ShardRecordProcessor shardRecordProcessor(StreamIdentifier stream) {
            return new Recorder(STREAMS.isEmpty() ? "" : stream.streamName() + ":");
        }
    }

    private static final class Recorder implements ShardRecordProcessor {
        private final String stream;
        private String shard;
        private int given;
        private boolean holds;

        Recorder(String stream) {
            this.stream = stream;
        }

        @Override
        public void initialize(InitializationInput input) {
            shard = stream + input.shardId();
            var from = input.extendedSequenceNumber();
            write("began", shard, ",\"from\":[\"" + from.sequenceNumber() + "\","
                    + from.subSequenceNumber() + "]");
        }

        @Override
        public void processRecords(ProcessRecordsInput input) {
            StringBuilder records = new StringBuilder(",\"records\":[");
            KinesisClientRecord last = null;
            for (KinesisClientRecord record : input.records()) {
                records.append(last == null ? "" : ",")
                        .append("[\"").append(record.sequenceNumber()).append("\",")
                        .append(record.subSequenceNumber()).append(",\"")
                        .append(text(record.data())).append("\"]");
                last = record;
            }
            write("batch", shard, records.append("]").toString());
            int before = given;
            given += input.records().size();
            if (HOLD_AFTER == 0) {
                checkpoint(input.checkpointer(), null);
            } else if (!holds && given >= HOLD_AFTER) {
                holds = true;
                checkpoint(input.checkpointer(), input.records().get(HOLD_AFTER - before - 1));
            }
        }

        private static String text(ByteBuffer data) {
            return StandardCharsets.US_ASCII.decode(data.duplicate()).toString();
        }

        private void checkpoint(RecordProcessorCheckpointer checkpointer, KinesisClientRecord at) {
            try {
                if (at == null) {
                    checkpointer.checkpoint();
                } else {
                    checkpointer.checkpoint(at.sequenceNumber(), at.subSequenceNumber());
                    write("checkpointed", shard,
                            ",\"at\":[\"" + at.sequenceNumber() + "\"," + at.subSequenceNumber() + "]");
                }
            } catch (ShutdownException lost) {
                write("refused", shard, "");
            } catch (InvalidStateException error) {
                throw new IllegalStateException(error);
            }
        }

        @Override
        public void leaseLost(LeaseLostInput input) {
            write("lost", shard, "");
        }

        @Override
        public void shardEnded(ShardEndedInput input) {
            checkpoint(input.checkpointer(), null);
            write("ended", shard, "");
        }

        @Override
        public void shutdownRequested(ShutdownRequestedInput input) {
            if (HOLD_AFTER == 0) {
                checkpoint(input.checkpointer(), null);
            }
            write("asked to stop", shard, "");
        }
    }
}
