//! Determines the rank of this process, from the command line or from the launcher that started it (such as Slurm or Open MPI).

use crate::pingpong::failure::Failure;

/// The largest number of ranks.
pub const MAX_RANKS: usize = 10_000;

/// The rank of this process, and the information that it needs to find the other ranks.
// local: arguments of the program
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSettings {
    /// The number of this process, from 0.
    pub rank: usize,
    /// The number of processes in the run.
    pub ranks: usize,
    /// The host name or address of rank 0, with or without a port.
    pub root: String,
    /// The port that this rank must listen on, if one was given.
    pub port: Option<u16>,
    /// The name of this rank's host in the report, if one was given.
    pub label: Option<String>,
    /// The name of the launcher that gave the rank's number. If the number was given on the command line, this is the name of that option.
    pub launcher: &'static str,
}

/// The command-line options that determine the rank.
// local: arguments of the program
#[derive(Clone, Debug, Default)]
pub struct RankOptions {
    /// The number of this process.
    pub rank: Option<usize>,
    /// The number of processes.
    pub count: Option<usize>,
    /// The hosts, one for each rank, with or without a port.
    pub hosts: Vec<String>,
    /// The host of rank 0.
    pub root: Option<String>,
    /// The name of this rank's host in the report.
    pub label: Option<String>,
}

/// A launcher: its name, and the environment variables that it sets.
struct Engine {
    name: &'static str,
    rank: &'static str,
    /// The names of the variables that may contain the number of ranks. If several of them are set, the first one is used.
    ranks: &'static [&'static str],
    /// The name of the variable that has the number of ranks on this machine.
    local: Option<&'static str>,
}

/// The supported launchers, the preferred one first. If mpirun runs inside a Slurm job, the variables of both are set. Slurm's variables
/// then describe the batch script instead of the rank, so Slurm is after the MPI launchers in this list.
const ENGINES: [Engine; 5] = [
    Engine {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: &["OMPI_COMM_WORLD_SIZE"],
        local: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
    },
    Engine { name: "PMI", rank: "PMI_RANK", ranks: &["PMI_SIZE"], local: Some("MPI_LOCALNRANKS") },
    Engine { name: "Slurm", rank: "SLURM_PROCID", ranks: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], local: None },
    Engine { name: "Kubernetes", rank: "JOB_COMPLETION_INDEX", ranks: &[], local: None },
    Engine { name: "PMIx", rank: "PMIX_RANK", ranks: &[], local: None },
];

/// The names of the variables that list the nodes of a Slurm step and of a Slurm job. The list of the step is used if it is set.
const NODE_LISTS: [&str; 2] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];

/// Determines the rank of this process. `env` returns an environment variable. `first_host` returns the first host of a Slurm node
/// list, as a name or address that can be resolved.
///
/// # Errors
/// A setting is missing or wrong. The text names the remedy.
pub fn place(
    given: &RankOptions,
    env: &dyn Fn(&str) -> Option<String>,
    first_host: &dyn Fn(&str) -> Result<String, Failure>,
) -> Result<RankSettings, Failure> {
    let engine = ENGINES.iter().find(|engine| env(engine.rank).is_some());
    let hosts = &given.hosts;
    let (rank, launcher) = match (given.rank, engine) {
        (Some(rank), _) => (rank, "the command line"),
        (None, Some(engine)) => (number(engine.rank, env)?.unwrap_or_default(), engine.name),
        (None, None) => {
            let cure = "give --rank with --hosts or --count, or start it by srun, mpirun or an Indexed Job";
            return Err(Failure::new(format!("which rank is this? {cure}")));
        }
    };
    let of_engine = match engine {
        Some(engine) => engine.ranks.iter().find_map(|name| number(name, env).transpose()).transpose()?,
        None => None,
    };
    let ranks = match (hosts.len(), given.count) {
        (0, Some(count)) => count,
        (0, None) => of_engine.ok_or_else(|| Failure::new("how many ranks are there? give --count"))?,
        (hosts, Some(count)) if hosts != count => {
            return Err(Failure::new(format!("{hosts} hosts and --count {count}: name one host per rank")));
        }
        (hosts, _) => hosts,
    };
    if !(2..=MAX_RANKS).contains(&ranks) {
        return Err(Failure::new(format!("{ranks} ranks: give 2 to {MAX_RANKS}")));
    }
    if rank >= ranks {
        return Err(Failure::new(format!("rank {rank} of {ranks}: the last one is {}", ranks - 1)));
    }
    let local = match engine.and_then(|engine| engine.local) {
        Some(name) => number(name, env)?,
        None => None,
    };
    let root = if let Some(root) = given.root.as_ref().or(hosts.first()) {
        root.clone()
    } else if let Some(list) = NODE_LISTS.into_iter().find_map(env) {
        first_host(&list)?
    } else if local == Some(ranks) {
        "127.0.0.1".into()
    } else {
        return Err(Failure::new("where is rank 0? give --root with its host name or address"));
    };
    let own = hosts.get(rank).map(|host| split_port(host));
    let label = given.label.clone().or_else(|| env("SLURMD_NODENAME")).or_else(|| own.map(|(host, _)| host.to_owned()));
    Ok(RankSettings { rank, ranks, root, port: own.and_then(|(_, port)| port), label, launcher })
}

/// Parses a file with a list of hosts. Each line has one host; `#` begins a comment.
///
/// # Errors
/// The file names no host.
pub fn hosts_of_file(text: &str) -> Result<Vec<String>, Failure> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let hosts: Vec<_> = lines.filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if hosts.is_empty() {
        Err(Failure::new("it names no host: write one host per line, rank 0 first"))
    } else {
        Ok(hosts)
    }
}

/// Splits `host:port` or `[address]:port` into the host and the port. The port may be missing.
fn split_port(text: &str) -> (&str, Option<u16>) {
    let port = text.rsplit_once(':').filter(|(host, _)| !host.contains(':') || host.ends_with(']'));
    match port.and_then(|(host, port)| Some((host, port.parse().ok()?))) {
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    }
}

fn number(name: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Option<usize>, Failure> {
    let Some(text) = env(name) else { return Ok(None) };
    let number = text.parse().map_err(|_| Failure::new(format!("{name} is {text:?}: it must be a number from 0")))?;
    Ok(Some(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(given: &RankOptions, vars: &[(&str, &str)]) -> Result<RankSettings, String> {
        let env = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let first = |list: &str| Ok(format!("first of {list}"));
        place(given, &env, &first).map_err(|failure| failure.to_string())
    }

    #[test]
    fn each_engine_is_understood() {
        let slurm = [("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_NODELIST", "n[1-2]")];
        let slurm = [&slurm[..], &[("SLURMD_NODENAME", "n2")]].concat();
        let place = find(&RankOptions::default(), &slurm).unwrap();
        assert_eq!((place.rank, place.ranks, place.root.as_str(), place.launcher), (3, 4, "first of n[1-2]", "Slurm"));
        assert_eq!(place.label.as_deref(), Some("n2"));

        // The variables of an mpirun that runs inside a Slurm batch script. The variables of Open MPI must be used.
        let mpi = [("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "8"), ("SLURM_PROCID", "0")];
        let mpi = [&mpi[..], &[("SLURM_NTASKS", "1"), ("SLURM_JOB_NODELIST", "n1")]].concat();
        let place = find(&RankOptions::default(), &mpi).unwrap();
        assert_eq!((place.rank, place.ranks, place.root.as_str(), place.launcher), (5, 8, "first of n1", "Open MPI"));

        let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "2")];
        assert_eq!(find(&RankOptions::default(), &pmi).unwrap().root, "127.0.0.1");
        let elsewhere = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "1")];
        assert!(find(&RankOptions::default(), &elsewhere).unwrap_err().contains("--root"));

        let given = RankOptions { count: Some(4), root: Some("mesh-0.mesh".into()), ..RankOptions::default() };
        let place = find(&given, &[("JOB_COMPLETION_INDEX", "2")]).unwrap();
        assert_eq!((place.rank, place.ranks, place.root.as_str(), place.launcher), (2, 4, "mesh-0.mesh", "Kubernetes"));
    }

    #[test]
    fn by_hand_the_hosts_say_all_but_the_rank() {
        let hosts: Vec<_> = ["a", "b:7001", "[fd00::1]:7002", "fd00::2"].map(str::to_owned).into();
        let given = |rank| RankOptions { rank: Some(rank), hosts: hosts.clone(), ..RankOptions::default() };
        let place = |rank| find(&given(rank), &[("SLURM_PROCID", "9")]).unwrap();
        assert_eq!((place(0).root.as_str(), place(0).port, place(0).ranks), ("a", None, 4));
        assert_eq!((place(1).label.as_deref(), place(1).port), (Some("b"), Some(7001)));
        assert_eq!((place(2).label.as_deref(), place(2).port), (Some("[fd00::1]"), Some(7002)));
        assert_eq!((place(3).label.as_deref(), place(3).port), (Some("fd00::2"), None));
        assert!(find(&given(4), &[]).unwrap_err().contains("rank 4 of 4"));
        let both = RankOptions { count: Some(5), ..given(0) };
        assert!(find(&both, &[]).unwrap_err().contains("4 hosts and --count 5"));
    }

    #[test]
    fn bad_surroundings_are_told_with_the_cure() {
        let error = |vars: &[(&str, &str)]| find(&RankOptions::default(), vars).unwrap_err();
        assert!(error(&[]).contains("--rank"));
        assert!(error(&[("JOB_COMPLETION_INDEX", "0")]).contains("--count"));
        assert!(error(&[("PMI_RANK", "x")]).contains("PMI_RANK is \"x\""));
        assert!(error(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]).contains("1 ranks: give 2 to 10000"));
        assert!(error(&[("PMI_RANK", "0"), ("PMI_SIZE", "10001")]).contains("10001 ranks"));
        assert!(hosts_of_file("# none\n\n").is_err());
        assert_eq!(hosts_of_file("a # first\n\n b:1\n").unwrap(), ["a", "b:1"]);
    }
}
