//! The targets of the attacks, and the check of results against them.

use std::collections::BTreeMap;

use serde::Serialize;

use super::newcomers::Outcome;
use super::row::{Attack, Attacked, Left, Measured, POOL_TIME, Row};
use super::{MAX_PENDING, Result, attacker, server};

/// The fraction of the honest newcomers that must connect. In rows for which [`Row::is_unnoticed`] returns true, all of them must connect.
/// In the other rows the attackers have many addresses or the address of the honest clients, or the server waits for a processor. If
/// [`Row::is_saturated`] returns true, one newcomer must connect.
pub const SHARE: f64 = 0.9;
/// The largest accepted ratio of the honest clients' p99 to their p99 in the control. It applies to rows for which [`Row::is_unnoticed`]
/// returns true.
pub const RATIO: f64 = 3.0;
/// The largest accepted ratio of the p99 values in rows with [`Attack::Scribbles`], instead of
/// [`RATIO`].
pub const RATIO_WITHIN_HOST: f64 = 2.0;
/// The largest accepted sum of the lengths of attackers' memory files that the server has mapped,
/// in bytes. It is the default limit of the library.
pub const MAPPED: u64 = 1 << 30;
/// The limit for two amounts of memory, in KiB: the private memory of the server in excess of that
/// of a server with honest peers, and the attackers' memory that is charged to the server.
pub const MORE_KIB: u64 = 64 << 10;

/// The largest accepted memory of a server after an attack, in KiB.
pub const RESIDENT_KIB: u64 = 64 << 10;

/// The results of honest clients, for the table.
#[derive(Clone, Debug, Serialize)]
pub struct Times {
    /// The number of newcomers, or of requested echoes.
    pub asked: usize,
    /// The number of successful newcomers, or of received echoes.
    pub up: usize,
    /// The number of failures for each reason.
    pub failed: std::collections::BTreeMap<String, usize>,
    /// The median time to the echo, in microseconds.
    pub p50_us: Option<u64>,
    /// The 99th percentile of the time to the echo, in microseconds.
    pub p99_us: Option<u64>,
    /// The longest time to the echo, in microseconds.
    pub max_us: Option<u64>,
}

impl Times {
    fn of(outcome: &Outcome) -> Self {
        let quantile = |share| outcome.quantile(share);
        Self {
            asked: outcome.all(),
            up: outcome.up(),
            failed: outcome.failed.clone(),
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            max_us: quantile(1.0),
        }
    }
}

/// The results of an attack, with the missed targets.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// The security of the server's connections.
    pub security: String,
    /// The name of the attack.
    pub attack: String,
    /// True if the server and the honest clients had a real-time priority.
    pub is_first: bool,
    /// The results of honest clients while another server was attacked.
    pub control: Option<Times>,
    /// The results of honest clients while their own server was attacked.
    pub attacked: Times,
    /// The report of a server whose peers are honest, but have as many connections as the attacker.
    pub beside: Option<server::Report>,
    /// The results of honest connections with large messages.
    pub crowd: Times,
    /// The number of honest clients that did not connect, for each reason.
    pub not_up: BTreeMap<String, usize>,
    /// The sum of all attackers' counters.
    pub attackers: attacker::Report,
    /// The server's report at the end of the attack.
    pub server: server::Report,
    /// The server's processor time, as a fraction of the attack's duration. It begins with the attackers' first connect.
    pub load: f64,
    /// The fraction of the attack's duration in which the server was ready to run but had no processor.
    pub waited: f64,
    /// The time in seconds until the pool had shrunk to its initial size.
    pub pool_seconds: Option<f64>,
    /// The memory of the server's process in KiB, when the pool had shrunk or the time limit for it was over.
    pub resident_kib: Option<u64>,
    /// A description of each missed target. Empty if the row passes.
    pub missed: Vec<String>,
}

/// Compares the results of a row with its targets. Returns a description of each missed target.
fn missed(row: &Row, attacked: &Attacked, control: Option<&Outcome>, left: Option<Left>) -> Vec<String> {
    let Attacked { honest, crowd, beside, attackers, server, load, waited } = attacked;
    let mut missed = Vec::new();
    let share = if row.is_unnoticed() { 1.0 } else { SHARE };
    let are_enough = if row.is_saturated(load + waited) { honest.up() > 0 } else { honest.share() >= share };
    if row.counts_newcomers() && !are_enough {
        missed.push(format!("{} of {} are up", honest.up(), honest.all()));
    }
    let p99 = |outcome: &Outcome| outcome.quantile(0.99).map(|us| us as f64);
    let most = if matches!(row.attack, Attack::Scribbles) { RATIO_WITHIN_HOST } else { RATIO };
    let ratio = p99(honest).zip(control.and_then(p99)).map(|(own, other)| own / other);
    if let Some(ratio) = ratio.filter(|&ratio| row.is_unnoticed() && ratio > most) {
        missed.push(format!("p99 is {ratio:.1} times that of the control"));
    }
    if control.is_some() && attackers.opened < row.least {
        missed.push(format!("{} connections of attackers, of {} at least", attackers.opened, row.least));
    }
    if row.is_within_host() && (server.touched, attackers.reached) != (0, 0) {
        missed.push(format!(
            "{} regions were written and {} things were done by peers without the right",
            server.touched, attackers.reached
        ));
    }
    if attackers.charged_kib > MORE_KIB {
        missed.push(format!("the server is charged for {} MiB of the attackers' memory", attackers.charged_kib >> 10));
    }
    let more = beside.map_or(0, |beside| server.private_kib.saturating_sub(beside.private_kib));
    if more > MORE_KIB {
        missed.push(format!("the server has {} MiB more than beside honest peers", more >> 10));
    }
    if server.mapped > MAPPED {
        missed.push(format!("{} MiB are mapped, of {} at most", server.mapped >> 20, MAPPED >> 20));
    }
    if crowd.share() < 1.0 && crowd.all() > 0 {
        missed.push(format!("{} of {} large messages came back", crowd.up(), crowd.all()));
    }
    if server.highest_unknown > MAX_PENDING as usize {
        missed.push(format!("{} connections are not up, of {MAX_PENDING} at most", server.highest_unknown));
    }
    if let Some(Left { pool, resident_kib }) = left {
        if pool.is_none() {
            missed.push(format!("the pool is not small again after {} s", POOL_TIME.as_secs()));
        }
        if resident_kib > RESIDENT_KIB {
            missed.push(format!(
                "{} MiB are resident afterwards, of {} at most",
                resident_kib >> 10,
                RESIDENT_KIB >> 10
            ));
        }
    }
    missed
}

impl Verdict {
    /// Evaluates the results of a row. Waits until the memory after the attack is known.
    ///
    /// # Errors
    /// The server does not send a report.
    pub fn of(measured: Measured) -> Result<Self> {
        let Measured { row, control, attacked, left } = measured;
        let left = left.map(|left| left.join().map_err(|_| "a thread has panicked")?).transpose()?;
        Ok(Self {
            security: format!("{:?}", row.security).to_lowercase(),
            attack: row.name(),
            is_first: row.is_first,
            missed: missed(&row, &attacked, control.as_ref(), left),
            control: control.as_ref().map(Times::of),
            attacked: Times::of(&attacked.honest),
            beside: attacked.beside,
            crowd: Times::of(&attacked.crowd),
            not_up: attacked.honest.failed,
            attackers: attacked.attackers,
            server: attacked.server,
            load: attacked.load,
            waited: attacked.waited,
            pool_seconds: left.and_then(|left| left.pool).map(|time| time.as_secs_f64()),
            resident_kib: left.map(|left| left.resident_kib),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::floods::Kind;
    use crate::hostile_run::attacker::{End, Plan, Source, Stage};
    use crate::hostile_run::row::{Attack, short};

    fn outcome(up: usize, refused: usize, micros: u64) -> Outcome {
        let failed = [("rejected".to_owned(), refused)].into_iter().filter(|&(_, count)| count > 0).collect();
        Outcome { micros: vec![micros; up], failed }
    }

    fn results(honest: Outcome, attackers: attacker::Report, server: server::Report) -> Attacked {
        let (crowd, beside) = (outcome(10, 0, 500), Some(server::Report::default()));
        Attacked { honest, crowd, beside, attackers, server, load: 0.5, waited: 0.0 }
    }

    fn judged(source: Source, honest: Outcome, highest_unknown: usize) -> Vec<String> {
        let left = Left { pool: Some(Duration::ZERO), resident_kib: RESIDENT_KIB };
        let plan = Plan { stage: Stage::Started, held: 1, rate: None, source, end: End::Server };
        judge(Attack::Connects(plan), (honest, highest_unknown), 0, left)
    }

    fn judge(attack: Attack, (honest, highest_unknown): (Outcome, usize), least: u64, left: Left) -> Vec<String> {
        let row = Row { attack, is_first: true, least, ..short()[0] };
        let server = server::Report { highest: 2000, highest_unknown, ..server::Report::default() };
        let attackers = attacker::Report { opened: 10, ..attacker::Report::default() };
        let attacked = results(honest, attackers, server);
        missed(&row, &attacked, Some(&outcome(100, 0, 500)), Some(left))
    }

    #[test]
    fn each_target_can_be_missed() {
        assert_eq!(judged(Source::One, outcome(100, 0, 1500), 1024), [""; 0]);
        assert_eq!(judged(Source::One, outcome(99, 1, 500), 0), ["99 of 100 are up"]);
        assert_eq!(judged(Source::One, outcome(100, 0, 1501), 0), ["p99 is 3.0 times that of the control"]);
        for source in [Source::Many, Source::Shared] {
            assert_eq!(judged(source, outcome(90, 10, 9000), 0), [""; 0]);
            assert_eq!(judged(source, outcome(89, 11, 500), 0), ["89 of 100 are up"]);
            assert_eq!(judged(source, outcome(0, 100, 0), 0), ["0 of 100 are up"]);
        }
        assert_eq!(judged(Source::One, outcome(100, 0, 500), 1025), ["1025 connections are not up, of 1024 at most"]);
        let flood = Attack::Flood(Kind::Data);
        let good = || (outcome(100, 0, 500), 0);
        let left = Left { pool: Some(Duration::ZERO), resident_kib: 0 };
        assert_eq!(judge(flood, (outcome(100, 0, 9000), 0), 10, left), ["p99 is 18.0 times that of the control"]);
        assert_eq!(judge(flood, good(), 10, left), [""; 0]);
        assert_eq!(judge(flood, (outcome(99, 1, 500), 0), 10, left), ["99 of 100 are up"]);
        assert_eq!(judge(flood, good(), 11, left), ["10 connections of attackers, of 11 at least"]);
        assert_eq!(judge(flood, good(), 0, Left { pool: None, ..left }), ["the pool is not small again after 60 s"]);
        let scribbles = |reached, micros| {
            let attackers = attacker::Report { opened: 10, reached, ..attacker::Report::default() };
            let row = Row { is_first: true, ..crate::hostile_run::row::scribbles(100) };
            let server = server::Report { touched: reached as usize, ..server::Report::default() };
            let attacked = results(outcome(100, 0, micros), attackers, server);
            missed(&row, &attacked, Some(&outcome(100, 0, 500)), None)
        };
        assert_eq!(scribbles(0, 1000), [""; 0]);
        assert_eq!(scribbles(0, 1001), ["p99 is 2.0 times that of the control"]);
        assert_eq!(scribbles(1, 500), ["1 regions were written and 1 things were done by peers without the right"]);
        let lendings = |charged_kib, private_kib, mapped, crowd| {
            let row = crate::hostile_run::row::lendings(10, 10, 100);
            let attackers = attacker::Report { opened: 10, charged_kib, ..attacker::Report::default() };
            let server = server::Report { private_kib, mapped, ..server::Report::default() };
            missed(&row, &Attacked { crowd, ..results(outcome(100, 0, 500), attackers, server) }, None, None)
        };
        assert_eq!(lendings(MORE_KIB, MORE_KIB, MAPPED, outcome(10, 0, 500)), [""; 0]);
        let all = [
            "the server is charged for 65 MiB of the attackers' memory",
            "the server has 65 MiB more than beside honest peers",
            "1025 MiB are mapped, of 1024 at most",
            "9 of 10 large messages came back",
        ];
        assert_eq!(lendings(MORE_KIB + 1024, MORE_KIB + 1024, MAPPED + (1 << 20), outcome(9, 1, 500)), all);
        let large = Left { resident_kib: RESIDENT_KIB + 1024, ..left };
        assert_eq!(judge(flood, good(), 0, large), ["65 MiB are resident afterwards, of 64 at most"]);
    }

    /// On a slow machine, the server may get more connects than it can serve. Newcomers that are lost there are no defect, but a server
    /// that serves none is one.
    #[test]
    fn a_saturated_server_may_lose_newcomers() {
        let judged = |row: Row, honest, load, waited| {
            let (server, attackers) = (server::Report::default(), attacker::Report::default());
            missed(&row, &Attacked { load, waited, ..results(honest, attackers, server) }, None, None)
        };
        let connects = short()[0];
        assert!(matches!(connects.attack, Attack::Connects(_)) && !connects.is_first);
        for (load, waited) in [(0.25, 0.0), (0.4, 0.35)] {
            assert_eq!(judged(connects, outcome(45, 5, 500), load, waited), [""; 0]);
            assert_eq!(judged(connects, outcome(44, 6, 500), load, waited), ["44 of 50 are up"]);
        }
        for (load, waited) in [(1.0, 0.0), (0.1, 0.75)] {
            assert_eq!(judged(connects, outcome(1, 49, 500), load, waited), [""; 0]);
            assert_eq!(judged(connects, outcome(0, 50, 500), load, waited), ["0 of 50 are up"]);
            let first = Row { is_first: true, ..connects };
            assert_eq!(judged(first, outcome(49, 1, 500), load, waited), ["49 of 50 are up"]);
            let scribbles = crate::hostile_run::row::scribbles(100);
            assert_eq!(judged(scribbles, outcome(1, 49, 500), load, waited), ["1 of 50 are up"]);
        }
    }

    #[test]
    fn a_quantile_is_that_of_the_nearest_rank() {
        let outcome = Outcome { micros: (1..=200).collect(), failed: Default::default() };
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| outcome.quantile(share)), [1, 100, 198, 200].map(Some));
        assert_eq!(Outcome::default().quantile(0.5), None);
    }
}
