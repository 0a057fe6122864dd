//! The plan of a measurement with one message size.

use std::time::Duration;

use rdma_reactor::{ExchangeOptions, ProviderChoice, Security};

use super::cli::RunArgs;
use super::failure::Failure;
use super::job::{Job, Mode, Op, WaitMode};

/// The binary logarithm of the largest size that `--all` measures.
const ALL_UP_TO: u32 = 20;

/// The extent of a measurement: a number of messages or a duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The measurement has this many messages.
    Messages(u64),
    /// The measurement has this duration.
    Time(Duration),
}

impl Extent {
    /// Returns true if the measurement is complete after this number of messages and this time.
    #[must_use]
    pub fn is_reached(&self, messages: u64, elapsed: Duration) -> bool {
        match *self {
            Self::Messages(count) => messages >= count,
            Self::Time(time) => elapsed >= time,
        }
    }

    /// Returns the fraction of the measurement that is done after this number of messages and this time, from 0 to 1.
    #[must_use]
    pub fn share(&self, messages: u64, elapsed: Duration) -> f64 {
        match *self {
            Self::Messages(count) => messages as f64 / count as f64,
            Self::Time(time) => elapsed.as_secs_f64() / time.as_secs_f64(),
        }
        .min(1.0)
    }
}

/// The plan of a measurement with one message size.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The parameters that the client sends to the server.
    pub job: Job,
    /// The extent of the measurement: a number of messages or a duration.
    pub extent: Extent,
    /// The number of messages that are sent before the measurement, on each connection.
    pub warmup: u64,
    /// The messages per second of an open loop; `None` for other measurements.
    pub rate: Option<f64>,
    /// The provider that carries the connections.
    pub provider: ProviderChoice,
    /// The options of connecting queue pairs by an exchange over TCP; `None` if rdma_cm connects them.
    pub exchange: Option<ExchangeOptions>,
    /// The security of the connections.
    pub security: Security,
    /// The time between two lines about intermediate results; `None` for no such lines.
    pub interval: Option<Duration>,
}

impl Plan {
    /// Makes one plan for each message size, in the order of the sizes.
    ///
    /// # Errors
    /// The flags conflict.
    pub fn from_args(args: &RunArgs, provider: ProviderChoice) -> Result<Vec<Self>, Failure> {
        let wait = match (args.events, args.wait) {
            (true, _) => WaitMode::Event,
            (false, Some(wait)) => wait,
            (false, None) if args.op == Op::Write && args.mode == Mode::Latency => WaitMode::Spin,
            (false, None) => WaitMode::suited(),
        };
        if args.op == Op::Write && args.mode == Mode::Latency && wait != WaitMode::Spin {
            let cure = "the peer is not notified of a write, so both sides must poll: --wait spin";
            return Err(Failure::new(format!("no latency of --op write with --wait {wait}: {cure}")));
        }
        if args.connections > 1 && args.op == Op::Write && args.mode == Mode::Latency {
            let cure = "polling memory for one connection takes a whole processor";
            return Err(Failure::new(format!("no latency of --op write with --connections: {cure}")));
        }
        for (given, flag, wanted, is) in [
            (args.bidirectional, "--bidirectional", "--op send", args.op == Op::Send),
            (args.touch, "--touch", "--op send", args.op == Op::Send),
            (args.direct, "--direct", "--op write or --op read", args.op != Op::Send),
            (args.rate.is_some(), "--rate", "--op send", args.op == Op::Send),
            (args.rate.is_some(), "--rate", "--mode latency", args.mode == Mode::Latency),
            (args.rate.is_some(), "--rate", "one connection", args.connections == 1),
        ] {
            if given && !is {
                return Err(Failure::new(format!("{flag} needs {wanted}")));
            }
        }
        wait.policy()?;
        if args.mode == Mode::Latency {
            let misplaced = [
                (args.bidirectional, "--bidirectional"),
                (args.tx_depth.is_some() && args.rate.is_none(), "--tx-depth"),
            ];
            if let Some((_, flag)) = misplaced.iter().find(|(given, _)| *given) {
                return Err(Failure::new(format!("{flag} needs --mode throughput")));
            }
        } else if args.svg.is_some() {
            return Err(Failure::new("--svg draws latency: leave it out, or use --mode latency"));
        }
        let security = args.device.security.security()?;
        let sizes =
            if args.all { (0..=ALL_UP_TO).map(|power| 1 << power).collect() } else { vec![Self::selected_size(args)] };
        Ok(sizes.into_iter().map(|size| Self::of_size(args, size, wait, (provider, &security))).collect())
    }

    /// Returns the message size whose histogram is shown.
    #[must_use]
    pub fn selected_size(args: &RunArgs) -> u32 {
        args.size.unwrap_or(64)
    }

    /// Returns a description of the time that is measured as latency.
    #[must_use]
    pub const fn time(&self) -> &'static str {
        match (self.rate, self.job.op) {
            (Some(_), _) => "round trip from the scheduled time",
            (None, Op::Send | Op::Write) => "half round trip",
            (None, Op::Read) => "read",
        }
    }

    fn of_size(args: &RunArgs, size: u32, wait: WaitMode, (provider, security): (ProviderChoice, &Security)) -> Self {
        let job = Job {
            mode: args.mode,
            op: args.op,
            wait,
            bidirectional: args.bidirectional,
            crc: !args.no_crc,
            touch: args.touch,
            direct: args.direct,
            system_congestion: args.system_congestion,
            size,
            depth: match args.mode {
                Mode::Latency if args.rate.is_none() => 1,
                _ => args.tx_depth.unwrap_or(Job::suited_depth(provider, size)),
            },
            connections: args.connections,
        };
        let usual = usual_iterations(args.mode, size);
        let extent = match (args.duration, args.iters) {
            (Some(time), _) => Extent::Time(time),
            (None, iters) => Extent::Messages(iters.unwrap_or(usual)),
        };
        let warmup = args.warmup.unwrap_or_else(|| (args.iters.unwrap_or(usual) / 10).min(1000));
        let (exchange, security) = (args.device.exchange(), security.clone());
        Self { job, extent, warmup, rate: args.rate, provider, exchange, security, interval: args.interval }
    }
}

/// Returns the default number of messages. This number is large enough for a stable result, and so small that the measurement takes about a
/// second at most.
#[must_use]
pub fn usual_iterations(mode: Mode, size: u32) -> u64 {
    match mode {
        Mode::Latency => ((40 << 20) / u64::from(size)).clamp(1000, 10_000),
        Mode::Throughput => ((1 << 30) / u64::from(size)).clamp(8, 500_000),
    }
}
